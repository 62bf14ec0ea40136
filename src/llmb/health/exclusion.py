# SPDX-License-Identifier: Apache-2.0
"""Nodes that jobs are to avoid: a list, which may name a file, or the unfit nodes of the last check and measurement."""

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from llmb.errors import UsageError
from llmb.health.check_nodes import stored
from llmb.health.kept_checks import HOW_TO_CHECK, HOW_TO_MEASURE, JudgedNodes, NoCheck, age_s, last_check, last_judged
from llmb.jobs.history import read_history
from llmb.jobs.store import Filter
from llmb.runs.record_file import BrokenRecord
from llmb.schedulers.port import Cluster

OPTION = "exclude"
UNFIT, FILE = "unfit", "@"
OLD_S = 24 * 3600
LONGEST_JOB_S = 7 * OLD_S
"""A job that was submitted before may still have ended since."""
_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\]|[\[\]])+")
_COMMENT = re.compile(r"#.*")
Say = Callable[[str], None]


def excluded_nodes(text: str, install: Path, cluster: Cluster, say: Say) -> str:
    """The list as the ``cluster`` takes it, empty for none: ``unfit`` and ``@FILE`` in it are replaced by nodes.

    ``say`` is called with the check that they are of. Raises UsageError if no check is kept, or a file is missing.
    """
    parts = [part.strip() for part in _PART.findall(text)]
    if not any(part.lower() == UNFIT or part.startswith(FILE) for part in parts):
        return text
    names: list[str] = []
    for part in parts:
        if part.lower() == UNFIT:
            names += _unfit(install, cluster, say)
        else:
            listed = listed_in(Path(part[1:])) if part.startswith(FILE) else part
            names += listed_names(listed, part, cluster)
    return cluster.host_list(names)


def listed_in(path: Path) -> str:
    """The nodes of a file, one or a list per line, as one list; ``#`` begins a comment. Raises UsageError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"the list of nodes cannot be read: {what}", where=str(path)) from error
    return ",".join(filter(None, (",".join(_COMMENT.sub("", line).split()).strip(",") for line in lines)))


def listed_names(listed: str, part: str, cluster: Cluster) -> list[str]:
    """The nodes of a list, which ``part`` is or names. Raises UsageError."""
    try:
        return cluster.host_names(listed)
    except ValueError as error:
        raise UsageError(f"{part} is not a list of nodes: {error}", do="give a list such as node[1-4,7]") from error


def _unfit(install: Path, cluster: Cluster, say: Say) -> list[str]:
    """By the last check, by the last pairwise measurement, which sees what no check does, or at fault in runs since."""
    try:
        checked, missing = _last_checked(install), None
    except NoCheck as error:
        checked, missing = None, error
    judged = _last_judged(install)
    names = [*_told(checked, "check", HOW_TO_CHECK, cluster, say)] if checked else []
    names += _told(judged, "pairwise measurement", HOW_TO_MEASURE, cluster, say) if judged else []
    known = checked or judged
    since_s = datetime.fromisoformat(known.started_at).timestamp() if known else time.time() - OLD_S
    # Nodes at fault in jobs that ended since then.
    with read_history(install, say) as history:
        jobs = history.jobs(Filter(since_s=since_s - LONGEST_JOB_S, kind="run"))
    late = (job for job in jobs if job.bad_nodes and (job.ended_s or job.checked_s or 0) > since_s)
    blamed = list(dict.fromkeys(node for job in late for node in (job.bad_nodes or "").split(",")))
    if missing and not known and not blamed:
        raise missing
    if blamed:
        when = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds")
        say(f"{UNFIT}: at fault in runs since {when}: {cluster.host_list(blamed)}")
    return list(dict.fromkeys((*names, *blamed)))


def _last_judged(install: Path) -> JudgedNodes | None:
    try:
        return last_judged(install)
    except BrokenRecord:
        raise
    except OSError as error:
        raise UsageError(f"the last measurement cannot be read: {error.strerror}", where=str(install)) from error


def _last_checked(install: Path) -> JudgedNodes:
    """Raises NoCheck, UsageError."""
    folder = last_check(install)
    try:
        result = stored(folder)
    except BrokenRecord:
        raise
    except OSError as error:
        raise UsageError(f"the last check cannot be read: {error.strerror}", where=str(folder.path)) from error
    fit, unfit, unchecked = map(tuple, (result.fit, result.unfit, result.unchecked))
    return JudgedNodes(started_at=result.started_at, fit=fit, unfit=unfit, undecided=unchecked)


def _told(judged: JudgedNodes, name: str, how: str, cluster: Cluster, say: Say) -> tuple[str, ...]:
    """The unfit nodes."""
    unfit, count = judged.unfit, len(judged.fit + judged.unfit + judged.undecided)
    what = f"{len(unfit)} of {count} nodes" if count != 1 else f"{len(unfit)} of 1 node"
    names = cluster.host_list(unfit)
    say(f"{UNFIT}: {what} in the {name} of {judged.started_at}{f': {names}' if names else ''}")
    if judged.undecided:
        say(f"warning: {cluster.host_list(judged.undecided)} had no result in that {name}, and may be unfit")
    age = age_s(judged.started_at)
    if age > OLD_S:
        say(f"warning: that {name} is {age / 3600:.0f} hours old; {how}")
    return unfit

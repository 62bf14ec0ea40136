# SPDX-License-Identifier: Apache-2.0
"""Stores and compares checks of several nodes, and resolves the list of nodes that jobs should avoid.

Each check has a folder in the install root with a report per node.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal

from llmb.base.errors import UsageError
from llmb.base.shown_text import counted, listed
from llmb.base.trust import STATE_FOLDER
from llmb.catalogue.records import Record
from llmb.jobs.history import read_history
from llmb.jobs.store import Filter
from llmb.jobs.task import CHECKS
from llmb.launch.scheduler_port import Cluster
from llmb.nodes.doctor.check_records import ANSWER, Check, CheckOptions, NodeReport, Status, worst
from llmb.nodes.doctor.rules import SAME_PCT, rule, rules
from llmb.readers.samples.node_settings import NodeSettings
from llmb.runs.folder import BrokenRecord, RunFolder, new_numbered, read_stored, write_atomically, write_newest, writing
from llmb.runs.record import now

Value = str | float

OF_SETTINGS = "settings-"
"""The prefix of folders that contain only settings of nodes."""
PAIRWISE = Path(STATE_FOLDER) / "pairwise.json"
STAMP = "%Y%m%dT%H%M%SZ"
HOW_TO_CHECK = "check nodes with 'llmb doctor --nodes LIST' or 'llmb doctor --partition NAME'"
HOW_TO_MEASURE = "measure again with 'llmb bench collectives --pairwise --nodes N'"


class NoCheck(UsageError):
    """Raised if no check of nodes exists."""


class NodesRequest(CheckOptions):
    """The request that every node of a check reads."""

    started_at: str
    """The time in ISO 8601 format in UTC."""
    nodes: tuple[str, ...]
    settings: bool = False
    """True to read only the settings of the nodes."""


class NodesResult(Record):
    """The result of a check of several nodes."""

    started_at: str
    reports: tuple[NodeReport, ...]
    """The reports, in the order of the request's nodes."""

    @property
    def unfit(self) -> list[str]:
        return [report.node for report in self.reports if report.status == "fail"]

    @property
    def unchecked(self) -> list[str]:
        """Return the nodes that did not answer, but are not unfit."""
        return [report.node for report in self.reports if report.status != "fail" and not report.answered]

    @property
    def fit(self) -> list[str]:
        return [report.node for report in self.reports if report.status != "fail" and report.answered]


class JudgedNodes(Record):
    """The nodes by verdict, from measurements between nodes or from a check."""

    schema_version: Literal[1] = 1
    started_at: str
    fit: tuple[str, ...]
    unfit: tuple[str, ...]
    undecided: tuple[str, ...]


class CheckFolder:
    """The files of a check. Names of files that are not reports begin with a dot, as no node's name does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / ".request.json"
        self.result = path / ".result.json"

    def report(self, node: str) -> Path:
        return self.path / f"{node}.json"

    def job(self, node: str) -> RunFolder:
        """Return the folder with the batch script and the output of a node's job."""
        return RunFolder(self.path / ".jobs" / node / "doctor")

    def settings(self, node: str) -> Path:
        return self.path / f".settings-{node}.json"

    def read_settings(self, node: str) -> NodeSettings:
        """Read a node's settings; raise OSError if they cannot be read, BrokenRecord if they are damaged."""
        return read_stored(self.settings(node), NodeSettings)

    def read_report(self, node: str) -> NodeReport:
        """Read a node's report; raise OSError if it cannot be read, BrokenRecord if it is damaged."""
        return read_stored(self.report(node), NodeReport)

    def read_request(self) -> NodesRequest:
        """Read the request; raise OSError if it cannot be read, BrokenRecord if it is damaged."""
        return read_stored(self.request, NodesRequest)


def new_check(install: Path, request: NodesRequest) -> CheckFolder:
    """Create a check's folder, or raise NotWritable; remove older complete checks of its kind except the last."""
    parent = install / CHECKS
    stamp = datetime.fromisoformat(request.started_at).strftime(STAMP)
    name = f"{OF_SETTINGS}{stamp}" if request.settings else stamp
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = CheckFolder(new_numbered(parent, name, Path.mkdir))
        write_atomically(folder.request, request.model_dump_json(indent=2) + "\n")
    ended = [path for path in _checks(install, settings=request.settings) if CheckFolder(path).result.exists()]
    for path in ended[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def write_result(folder: CheckFolder, result: NodesResult) -> None:
    """Write the result of a check; raise NotWritable if that fails."""
    with writing(folder.path):
        write_atomically(folder.result, result.model_dump_json(indent=2) + "\n")


def discard(folder: CheckFolder) -> None:
    """Remove the folder of a check for which no job was submitted."""
    shutil.rmtree(folder.path, ignore_errors=True)


def write_judged(install: Path, judged: JudgedNodes) -> Path:
    """Save the verdicts of a measurement and return the path; raise NotWritable if that fails."""
    path = install / PAIRWISE
    write_newest(path, judged.model_dump_json(indent=2) + "\n")
    return path


def last_judged(install: Path) -> JudgedNodes | None:
    """Read the saved verdicts; None if there are none. Raises BrokenRecord if damaged, OSError if unreadable."""
    path = install / PAIRWISE
    return read_stored(path, JudgedNodes) if path.exists() else None


def last_check(install: Path) -> CheckFolder:
    """Return the folder of the last check; raise NoCheck if there is none."""
    folders = [path for path in _checks(install, settings=False) if (path / ".request.json").is_file()]
    if not folders:
        raise NoCheck("no nodes have been checked yet", where=str(install / CHECKS), do=HOW_TO_CHECK)
    return CheckFolder(folders[-1])


def _checks(install: Path, *, settings: bool) -> list[Path]:
    folders = (install / CHECKS).glob("*")
    return sorted((path for path in folders if path.name.startswith(OF_SETTINGS) is settings), key=_stamp)


def _stamp(path: Path) -> tuple[str, int]:
    stamp, _, number = path.name.removeprefix(OF_SETTINGS).partition("-")
    return stamp, int(number) if number.isdecimal() else 1


@dataclass(frozen=True, slots=True)
class Problem:
    """The reason why a node has no valid report; ``case`` selects the advice."""

    status: Status
    reason: str
    case: str = ""

    def report(self, node: str) -> NodeReport:
        check = rule(ANSWER).check(self.status, self.reason, self.case)
        return NodeReport(node=node, checked_at=now(), status=self.status, checks=(check,))


def broken(error: BrokenRecord) -> Problem:
    return Problem("fail", f"its report: {error.what}")


def unchecked(reason: str) -> Problem:
    return Problem("warn", f"not checked: {reason}", "unchecked")


def stored(folder: CheckFolder) -> NodesResult:
    """Return the saved result of a check or, if there is none, a result from the reports that exist.

    Raises OSError if the result or the request cannot be read, BrokenRecord if it is damaged.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_stored(folder.result, NodesResult)
    request = folder.read_request()
    return NodesResult(started_at=request.started_at, reports=tuple(compared([*_reported(folder, request.nodes)])))


def _reported(folder: CheckFolder, nodes: tuple[str, ...]) -> Iterator[NodeReport]:
    for node in nodes:
        try:
            yield folder.read_report(node)
        except BrokenRecord as error:
            yield broken(error).report(node)
        except OSError:
            yield unchecked("the check ended before it reported").report(node)


def compared(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the reports with additional checks that compare the nodes."""
    checks = _different(reports)
    clocks = {report.node: report.clock_ahead_s for report in reports if report.clock_ahead_s is not None}
    if len(clocks) > 1:
        usual = median(clocks.values())
        for report in reports:
            if report.node in clocks:
                checks[report.node].append(_clock(report, clocks[report.node] - usual, len(clocks)))
    return [_with_checks(report, checks[report.node]) for report in reports]


def _with_checks(report: NodeReport, checks: Sequence[Check]) -> NodeReport:
    every = (*report.checks, *checks)
    return report.model_copy(update={"checks": every, "status": worst(check.status for check in every)})


def _different(reports: Sequence[NodeReport]) -> dict[str, list[Check]]:
    """Return warnings by node about values that at most half of the nodes have; only values of passed checks count."""
    checks: dict[str, list[Check]] = {report.node: [] for report in reports}
    for name in (item.name for item in rules().values() if item.same):
        values = {report.node: value for report in reports if (value := _value(report, name)) is not None}
        groups = grouped(values)
        if len(groups) < 2:
            continue
        for value_text, nodes in groups.items():
            if 2 * len(nodes) > len(values):
                continue
            others = sorted((item for item in groups.items() if item[0] != value_text), key=lambda item: -len(item[1]))
            text = listed(f"{other} on {counted(len(names), 'other node')}" for other, names in others)
            for node in nodes:
                checks[node].append(rule("nodes_same").check("warn", f"{value_text}; {text}", of=name))
    return checks


def _value(report: NodeReport, name: str) -> Value | None:
    return next((check.value for check in report.checks if check.name == name and check.status == "pass"), None)


def grouped(values: Mapping[str, Value]) -> dict[str, list[str]]:
    """Group nodes by the text of their value; numbers within ``SAME_PCT`` percent of the median form one group."""
    numbers = [value for value in values.values() if isinstance(value, (int, float))]
    usual = median(numbers) if numbers else 0.0
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        near = isinstance(value, (int, float)) and abs(value - usual) <= abs(usual) * SAME_PCT / 100
        groups.setdefault(f"{usual:g}" if near else str(value), []).append(node)
    return groups


def _clock(report: NodeReport, ahead_s: float, nodes: int) -> Check:
    unsure_s = report.clock_uncertainty_s or 0.0
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"{abs(ahead_s):.3f} s {side} the median of {nodes} nodes (± {unsure_s:.3f} s)"
    return rule("nodes_clock").measured(max(abs(ahead_s) - unsure_s, 0.0), text)


OPTION = "exclude"
UNFIT, FILE = "unfit", "@"
OLD_S = 24 * 3600
LONGEST_JOB_S = 7 * OLD_S
"""Jobs submitted more than this number of seconds before a check are assumed to have ended when the check began."""
_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\]|[\[\]])+")
_COMMENT = re.compile(r"#.*")
Say = Callable[[str], None]


def excluded_nodes(text: str, install: Path, cluster: Cluster, say: Say) -> str:
    """Return a list of nodes to avoid, in the cluster's syntax, with ``unfit`` and ``@FILE`` replaced by nodes.

    ``say`` reports the check and the measurement that are used. Raises UsageError if ``unfit`` is listed, but nodes
    were neither checked nor measured nor at fault, or if a check, measurement, file or list cannot be read, and
    EnvironmentProblem if a check or the measurement is damaged, or the history cannot be opened."""
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
    """Read a file with a node or a list per line, and comments with ``#``; raise UsageError if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"the list of nodes cannot be read: {what}", where=str(path)) from error
    return ",".join(filter(None, (",".join(_COMMENT.sub("", line).split()).strip(",") for line in lines)))


def listed_names(listed: str, part: str, cluster: Cluster) -> list[str]:
    """Return the names in a list of nodes; raise UsageError, which quotes ``part``, if the list is malformed."""
    try:
        return cluster.host_names(listed)
    except ValueError as error:
        raise UsageError(f"{part} is not a list of nodes: {error}", do="pass a list such as node[1-4,7]") from error


def _unfit(install: Path, cluster: Cluster, say: Say) -> list[str]:
    """Return nodes that are unfit by the last check or pairwise measurement, or that were at fault in later runs."""
    try:
        checked, missing = _last_checked(install), None
    except NoCheck as error:
        checked, missing = None, error
    judged = _last_judged(install)
    names = [*_told(checked, "check", HOW_TO_CHECK, cluster, say)] if checked else []
    names += _told(judged, "pairwise measurement", HOW_TO_MEASURE, cluster, say) if judged else []
    last = checked or judged
    since_s = datetime.fromisoformat(last.started_at).timestamp() if last else time.time() - OLD_S
    # Nodes at fault in jobs that ended since then.
    with read_history(install, say) as history:
        jobs = history.jobs(Filter(since_s=since_s - LONGEST_JOB_S, kind="run"))
    late = (job for job in jobs if job.bad_nodes and (job.ended_s or job.checked_s or 0) > since_s)
    blamed = list(dict.fromkeys(node for job in late for node in (job.bad_nodes or "").split(",")))
    if missing and not last and not blamed:
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
        raise UsageError(f"the pairwise measurement cannot be read: {error.strerror}", where=str(install)) from error


def _last_checked(install: Path) -> JudgedNodes:
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
    unfit, count = judged.unfit, len(judged.fit + judged.unfit + judged.undecided)
    what = f"{len(unfit)} of {count} nodes" if count != 1 else f"{len(unfit)} of 1 node"
    names = cluster.host_list(unfit)
    say(f"{UNFIT}: {what} in the {name} of {judged.started_at}{f': {names}' if names else ''}")
    if judged.undecided:
        say(f"warning: {cluster.host_list(judged.undecided)} had no result in that {name} and may be unfit")
    age = (datetime.now(UTC) - datetime.fromisoformat(judged.started_at)).total_seconds()
    if age > OLD_S:
        say(f"warning: that {name} is {age / 3600:.0f} hours old; {how}")
    return unfit

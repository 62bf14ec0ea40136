# SPDX-License-Identifier: Apache-2.0
"""An installation whose folder got another path: what holds the old one is mended."""

import re
from collections.abc import Callable
from pathlib import Path

from llmb.errors import EnvironmentProblem, UsageError
from llmb.install.answers import Answers
from llmb.install.environment import FOLDER as ENVIRONMENT
from llmb.install.environment import RECORD
from llmb.install.history import check_no_live_jobs
from llmb.install.paths import path_problem
from llmb.install.state import Journal, locked_journal, read_state
from llmb.jobs.history import database_path
from llmb.runs.folder import CLUSTER_CONFIG, cannot_write, write_atomically

LARGEST_SCRIPT = 1 << 20
LONGEST_INTERPRETER = 127
"""Of the line ``#!``: kernels before 5.1 cut it there."""


def move(old: Path, new: Path, say: Callable[[str], None]) -> None:
    """Moves the folder. A move that was killed is completed by the next call. Raises UsageError and
    EnvironmentProblem."""
    if not old.exists() and was_moved(new):
        return
    if problem := path_problem(str(new)):
        raise UsageError(f"--move: {problem}")
    if new.exists():
        raise UsageError("this already exists", where=str(new), do="give a path that does not exist")
    with locked_journal(old):
        check_no_live_jobs(old, "moved", say)
        try:
            old.rename(new)
        except OSError as error:
            do = f"move it yourself, such as with rsync; then 'llmb install --path {new}' mends the paths"
            raise EnvironmentProblem(f"cannot be moved: {error.strerror}", where=str(new), do=do) from error


def was_moved(root: Path) -> bool:
    """Whether the installation in ``root`` was made, or last mended, at another path."""
    state = read_state(root)
    return state is not None and is_elsewhere(Path(state.root), root)


def is_elsewhere(before: Path, root: Path) -> bool:
    """False for two names of the same folder, such as through a link."""
    return before != root and not (before.exists() and before.samefile(root))


def mended_answers(answers: Answers, old: Path, new: Path) -> Answers:
    """The answers with each path below ``old`` below ``new``. Pure."""
    texts = {name: value for name, value in answers.model_dump().items() if isinstance(value, str)}
    return answers.model_copy(update={name: _mended(value, old, new) for name, value in texts.items()})


def mend(journal: Journal) -> list[str]:
    """Mends the environment and a file of settings that its user changed; the steps write everything else again.

    Returns what is left to the user, in words. Raises EnvironmentProblem.
    """
    old, new = Path(journal.state.root), journal.root
    notes = []
    try:
        _mend_environment(new / ENVIRONMENT, journal.state.answers, old, new)
        config = new / CLUSTER_CONFIG
        if config.exists() and not journal.is_own(CLUSTER_CONFIG):
            text = config.read_text()
            if (mended := _mended(text, old, new)) != text:
                write_atomically(config, mended)
                notes.append(f"{CLUSTER_CONFIG}: {old} became {new}")
    except OSError as error:
        raise cannot_write(new, error) from error
    if database_path(new).exists():
        notes.append("call 'llmb jobs rebuild': the history lists run folders by their paths")
    image = journal.state.image
    journal.save(
        root=str(new),
        answers=mended_answers(journal.state.answers, old, new),
        image=_mended(image, old, new) if image else None,
    )
    return notes


def _mend_environment(folder: Path, answers: Answers, old: Path, new: Path) -> None:
    if answers.environment == "conda":
        (folder / RECORD).unlink(missing_ok=True)  # its programs hold their path: it is made again
        return
    for path in [*folder.glob("bin/*"), folder / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_SCRIPT:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a program
        mended = mended_script(text, old, new)
        if mended != text:
            write_atomically(path, mended)


def mended_script(text: str, old: Path, new: Path) -> str:
    """A script with its interpreter below ``new``. Pure."""
    mended = _mended(text, old, new)
    first, _, rest = mended.partition("\n")
    if not first.startswith(f"#!{new}/") or (" " not in first and len(first) <= LONGEST_INTERPRETER):
        return mended
    # As pip writes it where the path has a space, or is too long for the kernel.
    return f"#!/bin/sh\n'''exec' \"{first.removeprefix('#!')}\" \"$0\" \"$@\"\n' '''\n{rest}"


def _mended(text: str, old: Path, new: Path) -> str:
    """Paths that begin with ``old``, and not those that hold it further behind."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(old))}(?=[/\"'\s:]|$)", lambda _: str(new), text)

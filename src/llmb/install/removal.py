# SPDX-License-Identifier: Apache-2.0
"""Undoes an installation: removes what it made, and nothing else."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.checkpoints.prepared_data import PREPARED
from llmb.errors import UsageError
from llmb.install.state import (
    LOCK,
    InstallState,
    Made,
    locked_journal,
    partial_of,
    read_state,
    remove,
    state_path,
)
from llmb.jobs.history import database_path, read_history
from llmb.jobs.job import LIVE
from llmb.jobs.store import Filter
from llmb.jobs.task import PREPARATIONS
from llmb.runs.folder import writing
from llmb.trust import STATE_FOLDER, WORKLOADS, check_inside

RESULTS = ("experiments", PREPARATIONS, PREPARED)
"""Folders of a workload that runs and preparations made."""
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Removal:
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    """They were changed since, or hold something else."""


def planned_removal(root: Path, *, results: bool) -> list[str]:
    """What would be removed, if it is as it was made. Raises UsageError."""
    state = read_state(root)
    if state is None:
        do = "give the folder of an installation with --path, or set LLMB_INSTALL"
        raise UsageError("nothing was installed here", where=str(root), do=do)
    made = [item.path for item in state.made if (root / item.path).exists()]
    found = [str(path.relative_to(root)) for path in _results(root, state.answers.workloads)]
    return [*made, *(found if results else [])]


def undo(root: Path, say: Callable[[str], None], *, results: bool) -> Removal:
    """Removes what the journal lists; with ``results`` also results, prepared data and the history.

    One that was killed is completed by the next call. Raises UsageError while jobs run, EnvironmentProblem.
    """
    with locked_journal(root) as journal:
        _check_no_live_jobs(root, say)
        state = journal.state
        gone = []
        with writing(root):
            if results:
                for path in _results(root, state.answers.workloads):
                    shutil.rmtree(path)
                    gone.append(str(path.relative_to(root)))
                _remove_history(root)
            removed, kept = remove(root, [item for item in state.made if item.path != STATE_FOLDER])
            _remove_state(root, state)
    if root.exists() and state.made_root:
        kept = [*kept, "."]
    return Removal((*gone, *removed), tuple(kept))


def _results(root: Path, workloads: Sequence[str]) -> list[Path]:
    folders = [root / WORKLOADS / name / kind for name in workloads for kind in RESULTS]
    found = [path for path in folders if path.is_dir()]
    for path in found:
        check_inside(path, root)
    return found


def _remove_history(root: Path) -> None:
    for path in (root / STATE_FOLDER).iterdir():
        if path.name in (LOCK, state_path(root).name):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_state(root: Path, state: InstallState) -> None:
    """The state goes last, and together with its folders, so that a removal that is killed can be completed."""
    (root / STATE_FOLDER / LOCK).unlink(missing_ok=True)
    own_folder = state.made_root or Made(path=STATE_FOLDER, kind="folder") in state.made
    if not own_folder or len([*(root / STATE_FOLDER).iterdir()]) > 1:
        state_path(root).unlink()
        return
    is_empty = state.made_root and len([*root.iterdir()]) == 1
    target = root if is_empty else root / STATE_FOLDER
    shutil.rmtree(target.rename(partial_of(target)))


def complete_removal(root: Path) -> bool:
    """Removes what a removal, or the beginning of an installation, left when it was killed. True if that was all."""
    if state_path(root).exists():
        return False
    left = [partial for target in (root, root / STATE_FOLDER) if (partial := partial_of(target)).exists()]
    for partial in left:
        shutil.rmtree(partial)
    return bool(left)


def _check_no_live_jobs(root: Path, say: Callable[[str], None]) -> None:
    """Raises UsageError if jobs are queued or running, as far as is known without asking the scheduler."""
    if not database_path(root).exists():
        return
    with read_history(root, say) as store:
        live = [str(job.job_id or job.key) for job in store.jobs(Filter(states=LIVE))]
    if live:
        names = ", ".join(live[:MOST_NAMED]) + (", ..." if len(live) > MOST_NAMED else "")
        do = "wait for them ('llmb jobs wait'), or cancel them; 'llmb jobs refresh' asks the scheduler"
        raise UsageError(f"jobs are queued or running: {names}; nothing was removed", where=str(root), do=do)

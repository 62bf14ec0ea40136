# SPDX-License-Identifier: Apache-2.0
"""Opens the history of an install root, and rebuilds it from the run folders."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.base.errors import EnvironmentProblem
from llmb.base.shown_text import counted
from llmb.base.trust import STATE_FOLDER, WORKLOADS, check_links
from llmb.jobs.job import COLUMNS, Job, row_of_record
from llmb.jobs.locks import file_lock
from llmb.jobs.store import Damaged, Store
from llmb.jobs.task import FOLDERS as TASKS
from llmb.jobs.task import read_task
from llmb.runs.folder import NotWritable, RunFolder, writing
from llmb.runs.record import SubmittedJob, read_job, read_record

RUNS = f"{WORKLOADS}/*/experiments/*/*/*"
RUN_RECORD = "run.json"
DATABASE = "jobs.sqlite"
PATIENCE_S = 60.0
_PARTS = ("", "-wal", "-shm", "-journal")


def run_folders_below(install: Path) -> set[Path]:
    """Return the folders of all runs made, submitted or imported below ``install``, except hidden folders."""
    return {path.parent for path in _shown(install, f"{RUNS}/{RUN_RECORD}")}


def _shown(install: Path, pattern: str) -> list[Path]:
    """List the paths that match ``pattern``, sorted, except hidden paths that the pattern does not name."""
    parts = {*pattern.split("/")}
    paths = sorted(install.glob(pattern))
    return [path for path in paths if not any(part[0] == "." for part in {*path.relative_to(install).parts} - parts)]


def jobs_of_folders(install: Path) -> Iterator[Job]:
    """Yield the jobs recorded in the folders of runs and tasks, as pending; skip folders that cannot be read."""
    yield from _jobs(install, RUNS, lambda folder: row_of_record(read_record(folder)))
    for pattern in TASKS:
        yield from _jobs(install, pattern, lambda folder: read_task(folder).row())


def _jobs(install: Path, pattern: str, read: Callable[[RunFolder], dict[str, Any]]) -> Iterator[Job]:
    for path in _shown(install, f"{pattern}/job.json"):
        folder = RunFolder(path.parent)
        try:
            submitted, row = read_job(folder), read(folder)
        except (OSError, ValueError):
            continue  # one unreadable folder must not lose the others
        for one in (*submitted.earlier, submitted) if submitted else ():
            yield _job(folder, row, one)


def _job(folder: RunFolder, row: Mapping[str, Any], submitted: SubmittedJob) -> Job:
    return Job(
        **row,
        **{name: getattr(submitted, name) for name in SubmittedJob.model_fields if name in COLUMNS},
        run_dir=str(folder.path),
        experiment=folder.name,
        submitted_s=datetime.fromisoformat(submitted.submitted_at).timestamp(),
        state="PENDING",
        reason="as of its submission, because the history was rebuilt from the run folders",
    )


def database_path(install: Path) -> Path:
    """Return the path of the database; raise UsageError if it is reached through another user's link."""
    path = install / STATE_FOLDER / DATABASE
    check_links(path)
    return path


def open_history(install: Path, say: Callable[[str], None]) -> Store:
    """Open or, if missing, rebuild the history; raise UsageError if another user's link is in its path,
    EnvironmentProblem on failure."""
    path = database_path(install)
    if not _has_content(path):
        with _locked(path):  # another process must find the complete history
            if not _has_content(path):
                return _rebuilt(install, path, say)
    return _checked(Store(path, "change"))


def rebuild_history(install: Path, say: Callable[[str], None]) -> Store:
    """Open the history and add missing jobs from the run folders; rename and rebuild it if it is damaged."""
    path = database_path(install)
    try:
        with open_history(install, say) as store:
            added = store.restore(jobs_of_folders(install))
            store.jobs()  # some damage shows only when every row is read
        say(f"added {counted(added, 'job')} from run folders")
        return open_history(install, say)
    except Damaged as error:
        with _locked(path):
            say(f"{error.what}; it is kept as {_rename_damaged(path)}")
            return _rebuilt(install, path, say)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with file_lock(path.with_name("open.lock"), PATIENCE_S, "rebuilding the history of jobs"), writing(path):
        yield


def read_history(install: Path, say: Callable[[str], None]) -> Store:
    """Open the history for a command that only reads. If the file is missing in another user's root, or cannot be read,
    restore the history in memory from the run folders. A history in memory, or in a file that cannot be written,
    rejects changes. Raise the errors of ``open_history``."""
    path = database_path(install)
    try:
        if not install.exists():
            say(f"{install} does not exist, so it has no runs")
        elif _has_content(path) or _is_own(install):
            return open_history(install, say)
    except NotWritable:
        pass
    try:
        if _has_content(path):
            return _checked(Store(path, "read"))
    except EnvironmentProblem as error:
        say(f"{error.what}; reading the run folders instead")
    store = Store(path, "memory")
    store.restore(jobs_of_folders(install))
    store.lock_changes()
    return store


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        what = f"the history of jobs cannot be read: {error.strerror}"
        raise EnvironmentProblem(what, where=str(path), do="check the permissions of its folders") from error


def _is_own(install: Path) -> bool:
    try:
        return install.stat().st_uid == os.geteuid()
    except OSError:
        return True


def _checked(store: Store) -> Store:
    try:
        store.check()
    except BaseException:
        store.close()
        raise
    return store


def _rebuilt(install: Path, path: Path, say: Callable[[str], None]) -> Store:
    partial = path.with_name(f".{path.name}.partial")
    for part in _PARTS:
        Path(f"{partial}{part}").unlink(missing_ok=True)
    partial.touch(mode=0o666)  # subject to the umask; SQLite by itself lets only the owner write
    with Store(partial) as store:
        count = store.restore(jobs_of_folders(install))
    _rename_damaged(path)  # SQLite would take the old database's -wal and -shm files for the new one's
    partial.replace(path)
    if count:
        jobs = counted(count, "job")
        say(f"the history of jobs was rebuilt from {jobs} in run folders; run 'llmb jobs refresh' to update it")
    return Store(path)


def _rename_damaged(path: Path) -> Path:
    """Rename the database and its -wal, -shm and -journal files, even if only those exist; return the new name."""
    stamp = int(time.time())
    while any(Path(f"{path}.damaged-{stamp}{part}").exists() for part in _PARTS):
        stamp += 1
    aside = Path(f"{path}.damaged-{stamp}")
    for part in _PARTS:
        if Path(f"{path}{part}").exists():
            Path(f"{path}{part}").rename(f"{aside}{part}")
    return aside

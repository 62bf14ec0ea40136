# SPDX-License-Identifier: Apache-2.0
"""Opens the history of an install root; rebuilds it from the run folders if it is missing or damaged."""

import time
from collections.abc import Callable
from pathlib import Path

from llmb.jobs.locks import file_lock
from llmb.jobs.store import Damaged, Store

FOLDER = ".llmb"
DATABASE = "jobs.sqlite"
PATIENCE_S = 60.0
_PARTS = ("", "-wal", "-shm", "-journal")


def database_path(install: Path) -> Path:
    return install / FOLDER / DATABASE


def open_history(install: Path, say: Callable[[str], None]) -> Store:
    """The history below ``install``, of the current schema.

    A damaged one is renamed, which ``say`` reports; a missing or renamed one is rebuilt from the run folders.
    Raises EnvironmentProblem.
    """
    path = database_path(install)
    # A second process must find the complete history, and must not rename the new one.
    with file_lock(path.with_name("open.lock"), PATIENCE_S, "rebuilding the history of jobs"):
        if path.exists() and path.stat().st_size:
            try:
                return _open(path)
            except Damaged as error:
                say(f"{error.what}; it is kept as {rename_damaged(path)}")
        return _rebuilt(install, path, say)


def _open(path: Path) -> Store:
    store = Store(path)
    try:
        store.check()
    except BaseException:
        store.close()
        raise
    return store


def _rebuilt(install: Path, path: Path, say: Callable[[str], None]) -> Store:
    """A file of this name is a complete history: while it is written it has another name."""
    from llmb.jobs.rebuild import jobs_of_folders  # reads run folders, not needed for a complete history

    partial = path.with_name(f".{path.name}.partial")
    for part in _PARTS:
        Path(f"{partial}{part}").unlink(missing_ok=True)
    with Store(partial) as store:
        count = store.restore(jobs_of_folders(install))
    rename_damaged(path)  # SQLite would take the old database's -wal and -shm files for the new one's
    partial.replace(path)
    if count:
        say(f"the history of jobs was rebuilt from {count} jobs in run folders; 'llmb jobs refresh' updates them")
    return Store(path)


def rename_damaged(path: Path) -> Path:
    """Renames the database and its -wal, -shm and -journal files, also if only those exist; the new name."""
    stamp = int(time.time())
    while any(Path(f"{path}.damaged-{stamp}{part}").exists() for part in _PARTS):
        stamp += 1
    aside = Path(f"{path}.damaged-{stamp}")
    for part in _PARTS:
        if Path(f"{path}{part}").exists():
            Path(f"{path}{part}").rename(f"{aside}{part}")
    return aside

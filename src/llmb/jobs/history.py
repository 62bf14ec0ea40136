# SPDX-License-Identifier: Apache-2.0
"""Opens the history of an install root; makes it anew from the run folders where it is lost or broken."""

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

    One that is broken is put aside under another name, which ``say`` is told; where there is none, or none any more,
    it is made again from the run folders. Raises EnvironmentProblem.
    """
    path = database_path(install)
    # Whoever comes second must find the history whole, and must not put aside the new one.
    with file_lock(path.with_name("open.lock"), PATIENCE_S, "making the history of jobs"):
        if path.exists() and path.stat().st_size:
            try:
                return _open(path)
            except Damaged as error:
                say(f"{error.what}; it is kept as {put_aside(path)}")
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
    """A file of this name is a whole history: one that is being made has another."""
    from llmb.jobs.rebuild import jobs_of_folders  # reads run folders, which a whole history does not need

    partial = path.with_name(f".{path.name}.partial")
    for part in _PARTS:
        Path(f"{partial}{part}").unlink(missing_ok=True)
    with Store(partial) as store:
        count = store.restore(jobs_of_folders(install))
    put_aside(path)  # what a database that is gone left: it would be taken for a part of the new one
    partial.replace(path)
    if count:
        say(f"the history of jobs was made again from {count} jobs in run folders; 'llmb jobs refresh' updates them")
    return Store(path)


def put_aside(path: Path) -> Path:
    """The broken database's new name; its companions go with it, also those of one that is gone."""
    stamp = int(time.time())
    while any(Path(f"{path}.damaged-{stamp}{part}").exists() for part in _PARTS):
        stamp += 1
    aside = Path(f"{path}.damaged-{stamp}")
    for part in _PARTS:
        if Path(f"{path}{part}").exists():
            Path(f"{path}{part}").rename(f"{aside}{part}")
    return aside

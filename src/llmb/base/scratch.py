# SPDX-License-Identifier: Apache-2.0
"""Folders for the lifetime of a process. Leftovers of a killed process are removed by the next one."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_S = 60.0
"""Time that another process has to lock the folder that it has created."""


@contextmanager
def scratch_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in ``place``, which only its owner can enter, by default in the folder for temporary files.

    It is removed at the end, as are others with this prefix whose processes were killed. Raises OSError if it cannot
    be made.
    """
    place = place or Path(tempfile.gettempdir())
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # such as BlockingIOError: it is in use
            _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as made:
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks, on which no other process locks it
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(made)
        finally:
            os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Return folders that belong to this user; links are not followed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > NEW_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)

# SPDX-License-Identifier: Apache-2.0
"""Temporary folders for a block of code. Later processes remove folders that killed processes left behind."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEW_S = 60.0
"""Seconds that a process has to lock a folder after creating it."""


@contextmanager
def scratch_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that only this user can enter; raise OSError if it cannot be created."""
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
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > NEW_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)

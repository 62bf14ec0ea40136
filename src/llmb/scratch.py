# SPDX-License-Identifier: Apache-2.0
"""Folders for as long as a process needs them. What a killed process left is removed by the next one."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"
"""Locked while the process lives that made the folder; the kernel releases it however that ends."""
UNLOCKED_S = 3600.0
"""A folder with content and without that file is abandoned when it is so old: one of an earlier version, say."""


@contextmanager
def scratch_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """A new folder in ``place``, by default in that for temporary files, which only its owner can enter.

    It is removed at the end, as are others with this prefix whose processes were killed. Raises OSError if it cannot
    be made.
    """
    place = place or Path(tempfile.gettempdir())
    _remove_abandoned(prefix, place)
    folder, lock = _new_folder(prefix, place)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _new_folder(prefix: str, place: Path) -> tuple[Path, int]:
    """The folder, and its locked file: until it is locked, another process may take the folder for abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks, on which no other process locks it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if (folder / LOCK).exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_abandoned(prefix: str, place: Path) -> None:
    """Folders of this user alone; links are not followed."""
    with suppress(OSError):
        for folder in place.iterdir():
            if folder.name.startswith(prefix):
                with suppress(OSError):  # such as BlockingIOError: it is in use
                    _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - found.st_mtime > UNLOCKED_S:
            _remove(folder)
        else:
            folder.rmdir()  # if it is empty
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """The locked file last: a process that is killed here leaves it, or an empty folder."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)

# SPDX-License-Identifier: Apache-2.0
"""Locks between processes; the kernel releases them when their holders end or are killed."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmb.base.errors import EnvironmentProblem
from llmb.runs.folder import writing

POLL_S = 0.02


@contextmanager
def file_lock(path: Path, patience_s: float, what: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold the lock on ``path`` and yield its file descriptor; call ``on_wait`` once if another process holds it.

    A child that inherits the descriptor keeps the lock after its parent ends. Raise EnvironmentProblem if the lock is
    still held after ``patience_s`` seconds, or if the file cannot be opened or locked.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
    try:
        _acquire(descriptor, path, patience_s, what, on_wait)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """Open a lock file without following links or blocking on pipes, which another user may have created."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a lock file must not be a link", str(path)) from error
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Another user created it. Locking needs no write permission, except on a file system such as NFS.
        try:
            return os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:
            raise error from None


def _acquire(descriptor: int, path: Path, patience_s: float, what: str, on_wait: Callable[[], None]) -> None:
    end, is_held = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                do = "retry when it has ended; end it only if it hangs (lsof shows which process holds the file)"
                raise EnvironmentProblem(f"another process is {what}", where=str(path), do=do) from None
            if not is_held:
                is_held = True
                on_wait()
            time.sleep(POLL_S)
        except OSError as error:
            do = "set LLMB_INSTALL to a folder on a file system with locks"
            raise EnvironmentProblem(f"the file cannot be locked: {error.strerror}", where=str(path), do=do) from error
        else:
            return

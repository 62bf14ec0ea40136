# SPDX-License-Identifier: Apache-2.0
"""Measures the file system of a folder as a separate program, because a hung one blocks the process that uses it.

The arguments are the folder, the size of the test file in bytes (0 for none), and the maximum seconds per direction.
The program prints a JSON object per line: first ``space``, then, unless the size is 0, ``rates`` or a ``problem``.
"""

import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BLOCK = 4 * 2**20


def main(folder: str, size: int, limit_s: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the test file is removed
    target = Path(folder)
    place = next(path for path in (target, *target.parents) if _is_dir(path))
    status = os.statvfs(place)
    _print(
        space={
            "path": str(place.resolve()),
            "exists": place == target,
            "writable": os.access(place, os.W_OK | os.X_OK),
            "device": place.stat().st_dev,
            "free": status.f_bavail * status.f_frsize,
            "total": status.f_blocks * status.f_frsize,
            "free_inodes": status.f_favail,
            "inodes": status.f_files,
        }
    )
    if not size:
        return
    path = place / f".llmb-doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        _print(rates=_rates(path, size, limit_s))
    except OSError as error:
        _print(problem=error.strerror or str(error))
    finally:
        with suppress(OSError):
            path.unlink()


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _rates(path: Path, size: int, limit_s: float) -> dict[str, tuple[int, float, bool]]:
    """Return, by direction, the bytes, the seconds, and whether the page cache was bypassed."""
    path.touch()
    block = mmap.mmap(-1, BLOCK)  # O_DIRECT requires page-aligned memory
    block.write(os.urandom(BLOCK))
    written = _timed(path, os.O_WRONLY, lambda handle: os.write(handle, block), size, limit_s)
    return {"write": written, "read": _timed(path, os.O_RDONLY, lambda h: os.readv(h, [block]), written[0], limit_s)}


def _timed(path: Path, flags: int, move: Callable[[int], int], size: int, limit_s: float) -> tuple[int, float, bool]:
    """Time repeated calls of ``move``, each of which transfers a block; flush written data to disk at the end."""
    handle, direct = _opened(path, flags)
    try:
        if flags == os.O_RDONLY and not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began, written = time.monotonic(), 0
        while written < size and time.monotonic() - began < limit_s and (count := move(handle)):
            written += count
        if flags == os.O_WRONLY:
            os.fsync(handle)
        return written, time.monotonic() - began, direct
    finally:
        os.close(handle)


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):
            return os.open(path, flags | direct), True
    return os.open(path, flags), False


def _print(**document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

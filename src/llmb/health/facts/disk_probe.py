# SPDX-License-Identifier: Apache-2.0
"""Measures one folder; run as a program of its own, because a file system that hangs takes its process with it.

Arguments: the folder, the size of the test file in bytes (0 for none), and the seconds that each direction may take.
Prints a JSON object per line: ``space`` at once, then ``rates``.
"""

import json
import mmap
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

BLOCK = 4 * 2**20


def main(folder: str, size: int, limit_s: float) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the test file is removed
    wanted = Path(folder)
    place = next(path for path in (wanted, *wanted.parents) if _is_dir(path))
    _print("space", _space(place, exists=place == wanted))
    if not size:
        return
    path = place / f".llmb-doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        _print("rates", _rates(path, size, limit_s))
    except OSError as error:
        _print("rates", {"problem": error.strerror or str(error)})
    finally:
        with suppress(OSError):
            path.unlink()


def _is_dir(path: Path) -> bool:
    """False for one that cannot be looked at."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _space(place: Path, *, exists: bool) -> dict[str, object]:
    found = os.statvfs(place)
    return {
        "path": str(place.resolve()),
        "exists": exists,
        "writable": os.access(place, os.W_OK | os.X_OK),
        "device": place.stat().st_dev,
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "free_inodes": found.f_favail,
        "inodes": found.f_files,
    }


def _rates(path: Path, size: int, limit_s: float) -> dict[str, object]:
    before = time.time()
    path.touch()
    changed, after = path.stat().st_mtime, time.time()
    block = mmap.mmap(-1, BLOCK)  # O_DIRECT needs memory that begins at a page
    block.write(os.urandom(BLOCK))
    written, write_s, direct = _write(path, block, size, limit_s)
    read, read_s, direct_read = _read(path, block, written, limit_s)
    return {
        "written": written,
        "write_s": write_s,
        "direct": direct,
        "read": read,
        "read_s": read_s,
        "direct_read": direct_read,
        "clock_ahead_s": before - changed if changed < before else min(0.0, after - changed),
    }


def _write(path: Path, block: mmap.mmap, size: int, limit_s: float) -> tuple[int, float, bool]:
    """Bytes, seconds until they are on the disk, and whether they went past the page cache."""
    handle, direct = _opened(path, os.O_WRONLY)
    began, done = time.monotonic(), 0
    try:
        while done < size and time.monotonic() - began < limit_s:
            done += os.write(handle, block)
        os.fsync(handle)
        return done, time.monotonic() - began, direct
    finally:
        os.close(handle)


def _read(path: Path, block: mmap.mmap, size: int, limit_s: float) -> tuple[int, float, bool]:
    handle, direct = _opened(path, os.O_RDONLY)
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began, done = time.monotonic(), 0
        while done < size and time.monotonic() - began < limit_s:
            count = os.readv(handle, [block])
            if not count:
                break
            done += count
        return done, time.monotonic() - began, direct
    finally:
        os.close(handle)


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    if direct := getattr(os, "O_DIRECT", 0):
        with suppress(OSError):
            return os.open(path, flags | direct), True
    return os.open(path, flags), False


def _print(name: str, value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({name: value}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

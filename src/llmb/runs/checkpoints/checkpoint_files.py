# SPDX-License-Identifier: Apache-2.0
"""Folders that appear when complete, and CRC-32 checksums, which are fast in Python (``benchmarks/checksums.py``)."""

import errno
import fcntl
import io
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.trust import check_links

LOCK = ".lock"
PARTIAL = ".partial"


def partial_path(target: Path) -> Path:
    """Return the path at which ``target`` is written until it is complete."""
    return target.with_name(f".{target.name}{PARTIAL}")


@contextmanager
def new_folder(target: Path, is_worth_keeping: Callable[[Path], object] = lambda _: False) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when the block ends.

    Raise UsageError unless it is free, EnvironmentProblem if writing fails.
    """
    check_links(target.parent)
    check_free(target)
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        with (partial / LOCK).open("w") as lock:
            _lock(lock.fileno(), target)
            try:
                check_free(target)  # the previous holder of the lock may have completed it
                if not is_worth_keeping(partial):
                    _remove_content(partial)
                yield partial
                for folder in partial.glob("**/"):
                    flush_file(folder)
                partial.rename(target)
                (target / LOCK).unlink()  # not before: without it, another process would take this for a leftover
                flush_file(target.parent)
            finally:
                if partial.exists() and not is_worth_keeping(partial):
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, or use a folder on another disk" if full else "use a folder that you can write to"
        raise EnvironmentProblem(f"llmb cannot write: {error.strerror}", where=str(target), do=advice) from error


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        do = "wait until it ends, stop it, or use another folder"
        raise UsageError("another llmb process is writing to this folder", where=str(target), do=do) from error
    except OSError:
        return


def _remove_content(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def check_free(target: Path) -> None:
    """Raise UsageError if ``target`` exists, unless it is an empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError("the target already exists", where=str(target), do="choose a new folder, or remove this one")


def flush_file(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Verification = Literal["verified", "skipped"]
BLOCK = 2**22

OnBlock = Callable[[], object]


class ChecksumWriter(io.BufferedWriter):
    """A new file that is written sequentially while its checksum is computed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.crc = 0

    def write(self, data: Any, /) -> int:  # noqa: ANN401 (bytes, or anything with a buffer)
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)

    @property
    def checksum(self) -> str:
        return f"{self.crc:08x}"


def file_checksum(path: Path, on_block: OnBlock = lambda: None) -> str:
    """Return a file's checksum; call ``on_block`` after each block. Raise OSError if the file is unreadable."""
    crc = 0
    with path.open("rb", buffering=0) as stream:
        block = bytearray(BLOCK)
        while size := stream.readinto(block):
            crc = zlib.crc32(memoryview(block)[:size], crc)
            on_block()
    return f"{crc:08x}"


def damaged_files(
    folder: Path, checksums: Mapping[str, str], *, threads: int, on_block: OnBlock = lambda: None
) -> Iterator[str]:
    """Describe each file that cannot be read, or has a checksum other than that in ``checksums``."""

    def damage(item: tuple[str, str]) -> str | None:
        name, expected = item
        try:
            checksum = file_checksum(folder / name, on_block)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if checksum == expected else f"{name} has the checksum {checksum}, not {expected}"

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="checksum") as pool:
        yield from filter(None, pool.map(damage, checksums.items()))

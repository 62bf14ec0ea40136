# SPDX-License-Identifier: Apache-2.0
"""Takes files out of this machine's page cache, and looks whether they are gone: what is read from there is no storage.

What a file server keeps in its own memory is not known here.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

IN_MEMORY = b"\1"
"""What the kernel writes for a page that is there."""
WINDOW = 2**30
"""Bytes that are looked at together: more than a machine's memory might not be mapped at once."""
FEW = 0.01
"""A share of pages that changes no figure."""


def drop_cache(files: Sequence[Path], memory: str | None) -> str | None:
    """Why the files are still in memory; None if they are not. ``memory`` names a file system that has no disk."""
    if memory:
        return f"{memory} is memory"
    if not hasattr(os, "posix_fadvise"):
        return "this system cannot be asked to"
    try:
        for file in files:
            _drop(file)
        return _what_stayed(files)
    except OSError as error:
        return f"{error.strerror or error}"


def _drop(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not on the disk yet would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _what_stayed(files: Sequence[Path]) -> str | None:
    total, cached = map(sum, zip(*map(_pages, files), strict=True))
    share = cached / total if total else 0.0
    return None if share <= FEW else f"{100 * share:.0f} % stayed in the page cache"


def _pages(file: Path) -> tuple[int, int]:
    """The pages of a file, and how many of them are in memory. Raises OSError."""
    size, total, cached = file.stat().st_size, 0, 0
    with file.open("rb") as stream:
        for begin in range(0, size, WINDOW):
            length = min(WINDOW, size - begin)
            with mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=begin) as mapped:
                found = _in_memory(mapped)
            total, cached = total + len(found), cached + found.count(IN_MEMORY)
    return total, cached


def _in_memory(mapped: mmap.mmap) -> bytes:
    """A byte for each page."""
    found = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
    first, libc = ctypes.c_char.from_buffer(mapped), ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
    failed = libc.mincore(address, length, found)
    del first  # else the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found.raw

# SPDX-License-Identifier: Apache-2.0
"""Checksums of a checkpoint's files: CRC-32, as eight hexadecimal digits.

They find damage, not forgery: CRC-32 misses one changed file in 4 billion. It is the fastest that Python has, with or
without instructions of the CPU for hashes (``benchmarks/checksums.py``).
"""

import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

Verification = Literal["verified", "skipped"]
BLOCK = 2**22

OnBlock = Callable[[], object]


class ChecksumWriter(io.BufferedWriter):
    """A new file whose checksum is computed while it is written, front to back."""

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
    """Reads the whole file; ``on_block`` is called for every 4 MiB. Raises OSError."""
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
    """What is wrong with each file whose content has another checksum, or cannot be read."""

    def damage(item: tuple[str, str]) -> str | None:
        name, expected = item
        try:
            found = file_checksum(folder / name, on_block)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if found == expected else f"{name} has the checksum {found}, not {expected}"

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="checksum") as pool:
        yield from filter(None, pool.map(damage, checksums.items()))

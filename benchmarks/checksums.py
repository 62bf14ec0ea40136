# SPDX-License-Identifier: Apache-2.0
"""What checksums of checkpoints cost: hash functions side by side, and saving and verifying files with and without.

Rates are in GiB per second of processor time, so that other load on the machine does not count; files are in the page
cache. Target: verifying takes at most 1 s of processor time per GiB.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from llmb.runs.checkpoints.checkpoint_files import BLOCK, ChecksumWriter, damaged_files, file_checksum

GIB = 2**30
TARGET_S_PER_GIB = 1.0
HASHES = ("md5", "sha256", "blake2b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the files (default: %(default)s MiB)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    document = measure(options.mib * 2**20, options.repeats)
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{name:22} {value:8.2f}\n" for name, value in document.items()))
    sys.exit(0 if document["verify_s_per_gib"] <= TARGET_S_PER_GIB else 1)


def measure(size: int, repeats: int) -> dict[str, float]:
    """Medians of alternating runs. Files are four, as four ranks write them."""
    block = os.urandom(BLOCK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = {str(number): write_and_checksum(folder / str(number), block, size // 4) for number in range(4)}
        sides: dict[str, Callable[[], Any]] = {
            "crc32": lambda: crc32(block, size),
            **{name: partial(digest, name, block, size) for name in HASHES},
            "read": lambda: read(folder, saved),
            "verify": lambda: [file_checksum(folder / file) for file in saved],
            "write": lambda: write(folder / "new", block, size),
            "write_and_checksum": lambda: write_and_checksum(folder / "new", block, size),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, action in sides.items():
                began = time.process_time()
                action()
                times[side].append(time.process_time() - began)
        walls = {threads: wall_of(folder, saved, threads, repeats) for threads in (1, os.cpu_count() or 1)}
    seconds = {side: statistics.median(values) for side, values in times.items()}
    rates = {f"{name}_gib_per_s": size / GIB / seconds[name] for name in ("crc32", *HASHES)}
    costs = {f"{name}_s_per_gib": seconds[name] / (size / GIB) for name in sides if name not in ("crc32", *HASHES)}
    speedup = walls[1] / walls[os.cpu_count() or 1]
    return {**rates, **costs, "verify_threads": os.cpu_count() or 1, "verify_speedup": speedup}


def crc32(block: bytes, size: int) -> None:
    crc = 0
    for _ in range(size // BLOCK):
        crc = zlib.crc32(block, crc)


def digest(name: str, block: bytes, size: int) -> None:
    hashing = hashlib.new(name)
    for _ in range(size // BLOCK):
        hashing.update(block)
    hashing.digest()


def read(folder: Path, names: Iterable[str]) -> None:
    block = bytearray(BLOCK)
    for name in names:
        with (folder / name).open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def write(path: Path, block: bytes, size: int) -> None:
    with path.open("wb") as stream:
        for _ in range(size // BLOCK):
            stream.write(block)


def write_and_checksum(path: Path, block: bytes, size: int) -> str:
    with ChecksumWriter(path) as stream:
        for _ in range(size // BLOCK):
            stream.write(block)
    return stream.checksum


def wall_of(folder: Path, saved: dict[str, str], threads: int, repeats: int) -> float:
    """The shortest of several: the wall time on an otherwise idle machine."""
    walls = []
    for _ in range(repeats):
        began = time.perf_counter()
        if damaged := list(damaged_files(folder, saved, threads=threads)):
            raise RuntimeError(damaged[0])
        walls.append(time.perf_counter() - began)
    return min(walls)


if __name__ == "__main__":
    main()

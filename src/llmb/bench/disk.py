# SPDX-License-Identifier: Apache-2.0
"""Writing and reading files as large as a rank's part of a checkpoint: the job, its timings, what they mean. Pure."""

from dataclasses import dataclass
from typing import Literal

from llmb.bench.records import Measurement
from llmb.catalogue.records import Record

PROGRAM = "llmb.bench.disk_worker"
Cache = Literal["past", "through"]
"""Whether the operating system's page cache is in the way of the disk."""


class DiskJob(Record):
    """``ranks`` processes write a file each in ``folder``, all at once, then read it back; ``repeats`` times."""

    folder: str
    size_bytes: int
    """Size of each file as it is written: whole blocks."""
    ranks: int
    repeats: int
    cache: Cache


class DiskTiming(Record):
    """Seconds from the start of all processes to the end of the last one, fsync included, for each repetition."""

    write_s: tuple[float, ...]
    read_s: tuple[float, ...]
    direct: bool
    """The file system took O_DIRECT."""


BLOCK_BYTES = 4096
"""Direct reads and writes are multiples of it on every usual file system."""


def whole_blocks(size_bytes: int) -> int:
    """What is written of a file that is to have so many bytes."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds to save and to load a whole checkpoint.

    ``each``: every node has the rate that was measured; ``shared``: all nodes together have it.
    """

    checkpoint_bytes: int
    nodes: int
    save_each_s: float
    save_shared_s: float
    load_each_s: float
    load_shared_s: float


def prediction(checkpoint_bytes: int, nodes: int, write_gb_per_s: float, read_gb_per_s: float) -> Prediction:
    whole = checkpoint_bytes / 1e9
    save, load = whole / write_gb_per_s, whole / read_gb_per_s
    return Prediction(checkpoint_bytes, nodes, save / nodes, save, load / nodes, load)


def rate(rows: tuple[Measurement, ...], case: str) -> float:
    """Rate of a case that was measured, GB/s."""
    return next(row.bandwidth_gb_per_s for row in rows if row.case == case and row.bandwidth_gb_per_s)


def way_text(timing: DiskTiming, cache: Cache) -> str:
    """How the page cache was treated, in words."""
    if cache == "through":
        return "through the page cache"
    return "past the page cache (O_DIRECT)" if timing.direct else "page cache dropped before reading (no O_DIRECT)"

# SPDX-License-Identifier: Apache-2.0
"""Collectives of a benchmark: sizes, data and expected results, bandwidths, and the job's records. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from llmb.bench.jobs import DeviceReport
from llmb.catalogue.records import Record
from llmb.runs.host import Device

PROGRAM = "llmb.bench.worker.collectives"
JOB, RESULT = "collectives_job.json", "collectives_result.json"
"""Files in the folder that the program is called with."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
"""By the names of nccl-tests."""
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ELEMENT_BYTES = 4
"""fp32, the default of nccl-tests."""
ALIGNED = 16
"""Bytes of which each rank's part is a multiple, where ranks have parts."""
SHOWN_AS_SUM: frozenset[Collective] = frozenset(["all_reduce", "reduce_scatter", "sendrecv"])
"""nccl-tests names a reduction for these; send and receive has none."""
UNCHECKED_IN_PLACE: frozenset[Collective] = frozenset(["alltoall", "sendrecv"])
"""Data that is sent may be overwritten before: there is no right result."""
BASES, WEIGHTS = 61, 64
"""Values are small enough for sums of 8,000 ranks to be exact in fp32."""


class CollectiveJob(Record):
    """What every rank measures, in this order. ``sizes`` in bytes."""

    device: Device
    collectives: tuple[Collective, ...]
    sizes: tuple[int, ...]
    limited_by_memory: bool = False
    """Sizes that do not fit are left out; else they are an error."""
    warm_ups: int
    iterations: int


class Way(Record):
    """Calls out of place, or in place."""

    time_s: float
    """Time of one call: the mean of all iterations and ranks, as in nccl-tests."""
    wrong: int | None
    """Elements of all ranks that differ from the expected result; None where there is no expected result."""


class CollectiveRow(Record):
    """One collective at one size. A way is None if the library has no such call."""

    collective: Collective
    size_bytes: int
    count: int
    out_of_place: Way | None
    in_place: Way | None


class NotTimed(Record):
    """A size and all larger ones, or without a size a whole collective, that could not be measured."""

    collective: Collective
    size_bytes: int | None
    reason: str
    out_of_memory: bool = False


class RankReport(Record):
    """One rank, and where it ran."""

    rank: int
    node: str
    local_rank: int
    pid: int
    device: str
    bus_id: str | None
    """Bus id of the GPU, as in ``0000:04:00``."""


class CollectiveResult(Record):
    """What rank 0 writes."""

    backend: str
    device: DeviceReport
    """The device of rank 0."""
    ranks: tuple[RankReport, ...]
    rows: tuple[CollectiveRow, ...]
    not_timed: tuple[NotTimed, ...]

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(rank.node for rank in self.ranks))


@dataclass(frozen=True, slots=True)
class Extent:
    """What one call moves, in elements. ``count`` is what NCCL's function is called with: of one part, if ranks have
    parts."""

    count: int
    sent: int
    received: int

    @property
    def size_bytes(self) -> int:
        """The size that bandwidths are computed from, which is that of the whole array."""
        return max(self.sent, self.received) * ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Values ``count`` long from ``at`` in a buffer: element i is ``((offset + i) % BASES + 1) * weight``."""

    at: int
    count: int
    offset: int
    weight: int


def extent(collective: Collective, size_bytes: int, ranks: int) -> Extent:
    """Where ranks have parts, the size is rounded down to equal parts, which may be nothing."""
    if collective in ("all_reduce", "sendrecv"):
        count = size_bytes // ELEMENT_BYTES
        return Extent(count, count, count)
    part = size_bytes // ELEMENT_BYTES // ranks // (ALIGNED // ELEMENT_BYTES) * (ALIGNED // ELEMENT_BYTES)
    whole = part * ranks
    sent = part if collective == "all_gather" else whole
    return Extent(part, sent, part if collective == "reduce_scatter" else whole)


def extents(collective: Collective, sizes: tuple[int, ...], ranks: int) -> list[Extent]:
    """Without empty ones, and each size once."""
    found = (extent(collective, size, ranks) for size in sizes)
    return list(dict.fromkeys(one for one in found if one.count))


def sizes_between(least: int, most: int, factor: int) -> Iterator[int]:
    size = least
    while size <= most:
        yield size
        size *= factor


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if collective == "sendrecv":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def algorithm_gb_per_s(size_bytes: int, seconds: float) -> float:
    return size_bytes / 1e9 / seconds


def sent_data(size: Extent, rank: int) -> Piece:
    """What a rank sends."""
    return Piece(0, size.sent, 0, _weight(rank))


def expected_data(collective: Collective, size: Extent, rank: int, ranks: int) -> list[Piece]:
    """What a rank has received when all is right."""
    total = sum(map(_weight, range(ranks)))
    match collective:
        case "all_reduce":
            return [Piece(0, size.count, 0, total)]
        case "reduce_scatter":
            return [Piece(0, size.count, rank * size.count, total)]
        case "all_gather":
            return [Piece(other * size.count, size.count, 0, _weight(other)) for other in range(ranks)]
        case "alltoall":
            start = rank * size.count
            return [Piece(other * size.count, size.count, start, _weight(other)) for other in range(ranks)]
        case "sendrecv":
            return [Piece(0, size.count, 0, _weight((rank - 1) % ranks))]


def _weight(rank: int) -> int:
    return rank % WEIGHTS + 1

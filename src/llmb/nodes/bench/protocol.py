# SPDX-License-Identifier: Apache-2.0
"""The protocol of the programs that measure: an input file with a job, progress on stdout, and a file with results.

``python -m llmb.nodes.bench.worker.measure_device JOB_FILE RESULT_FILE`` times cases. ``python -m
llmb.nodes.bench.worker.collective_timing FOLDER`` times collectives, whose sizes, data, expected results and bandwidths
are also defined here. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.prediction.work import TrainingPass
from llmb.readers.samples.host import Device
from llmb.runs.attention_choice import AttentionChoice

TIMING_PROGRAM = "llmb.nodes.bench.worker.measure_device"
ProductDtype = Literal["bf16", "fp16", "fp32", "fp8"]
Direction = Literal["forward", "backward", "both"]
DIRECTIONS: dict[Direction, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of attention relative to a forward pass, which has two products; backward has five, one to recompute scores."""
PASSES: tuple[TrainingPass, ...] = ("forward", "input_gradient", "weight_gradient")


class ProductCase(Record):
    """The matrix product of a layer with inputs [m, k] and weights [n, k], in one of its training passes.

    The result of ``forward`` is [m, n], of ``input_gradient`` [m, k], of ``weight_gradient`` [n, k]; each takes 2mkn
    FLOPs.
    """

    kind: Literal["product"] = "product"
    m: int
    k: int
    n: int
    dtype: ProductDtype
    training_pass: TrainingPass

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


class AttentionCase(Record):
    """Causal attention over whole sequences; ``both`` is a forward pass followed by its backward pass."""

    kind: Literal["attention"] = "attention"
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: ProductDtype
    direction: Direction
    backend: AttentionChoice

    @property
    def flops(self) -> float:
        """Return the FLOPs, counting only the causal half of all pairs of tokens; see ``DIRECTIONS``."""
        return DIRECTIONS[self.direction] * 2 * self.batch * self.heads * self.seq_len**2 * self.head_dim


class CopyCase(Record):
    """A copy of ``size_bytes`` within the device's memory; each byte is read and written once."""

    kind: Literal["copy"] = "copy"
    size_bytes: int


class TransferCase(Record):
    """A copy of ``size_bytes`` between host and device; ``pinned`` memory cannot be paged out."""

    kind: Literal["transfer"] = "transfer"
    size_bytes: int
    direction: Literal["host_to_device", "device_to_host"]
    pinned: bool


class LaunchCase(Record):
    """The launch of a kernel that adds one number.

    ``host``: the host's time to queue it, or on a CPU, to run it. ``device``: the device's time for each of many in its
    queue. ``graph``: the device's time for each in a CUDA graph. ``round_trip``: the time to queue one and wait for it.
    """

    kind: Literal["launch"] = "launch"
    way: Literal["host", "device", "graph", "round_trip"]


Work = Annotated[ProductCase | AttentionCase | CopyCase | TransferCase | LaunchCase, Field(discriminator="kind")]


class Case(Record):
    """A case to time, and its name for progress and errors."""

    name: str
    work: Work
    sustained_s: float | None = None
    """Seconds for which the case is repeated; only the last third is timed. None for a burst."""


class CaseList(Record):
    """The cases to time. Bursts end after ``enough_s`` or ``most_repeats``, and have at least ``least_repeats``."""

    device: Device
    cases: tuple[Case, ...]
    warm_ups: int = 2
    least_repeats: int = 3
    most_repeats: int = 20
    enough_s: float = 0.08


class Timing(Record):
    """Median, minimum and maximum seconds of a call or, for sustained work, of the means of chunks; None on failure."""

    seconds: float | None
    fastest: float | None = None
    slowest: float | None = None
    repeats: int = 0
    backend: str | None = None
    reason: str | None = None
    out_of_memory: bool = False


class DeviceReport(Record):
    """The measured device and the software that used it."""

    python: str
    torch: str
    cuda: str | None
    cudnn: str | None
    cudnn_number: int | None
    """The cuDNN version as torch reports it, such as 91002."""
    nccl: str | None
    driver: str | None
    device: str
    device_memory_gib: float | None
    cpu_threads: int
    binding: str | None = None
    """The CPUs and memory to which the process is bound, or the reason for no binding; None if it was not tried."""


class Timings(Record):
    """The timings of a job, in the order of its cases."""

    device: DeviceReport
    timings: tuple[Timing, ...]


class BenchProgress(Record):
    """A line of progress on stdout: the next case, its number counted from 0, and the number of cases.

    ``seconds`` is the minimum time of the case, if it is sustained.
    """

    name: str
    number: int
    total: int
    seconds: float | None = None


COLLECTIVES_PROGRAM = "llmb.nodes.bench.worker.collective_timing"
COLLECTIVES_JOB, COLLECTIVES_RESULT = "collectives_job.json", "collectives_result.json"
"""Names of files in the folder that is the program's argument."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]
"""Collectives, by their names in nccl-tests."""
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ELEMENT_BYTES = 4
"""Bytes of an fp32 element, the default of nccl-tests."""
ALIGNED = 16
"""If the data is divided among ranks, each part is a multiple of this number of bytes."""
SHOWN_AS_SUM: frozenset[Collective] = frozenset(["all_reduce", "reduce_scatter", "sendrecv"])
"""Collectives for which nccl-tests prints the reduction ``sum``, even though sendrecv does not reduce."""
UNCHECKED_IN_PLACE: frozenset[Collective] = frozenset(["alltoall", "sendrecv"])
"""Collectives that, in place, may overwrite data before it is sent, so that no result is expected."""
BASES, WEIGHTS = 61, 64
"""Upper bounds of the factors of a value, small enough that sums over 8,000 ranks are exact in fp32."""


class CollectiveJob(Record):
    """The collectives that all ranks measure, in order, with ``sizes`` in bytes."""

    device: Device
    collectives: tuple[Collective, ...]
    sizes: tuple[int, ...]
    recipe: str | None = None
    """Description of the recipe that determines the sizes, if any."""
    limited_by_memory: bool = False
    """True if sizes that do not fit into memory are skipped; otherwise they are an error."""
    warm_ups: int
    iterations: int


class Way(Record):
    """The result of out-of-place or in-place calls."""

    time_s: float
    """Time of one call in seconds, as a mean over iterations and ranks, as in nccl-tests."""
    wrong: int | None
    """The number of elements, over all ranks, that differ from the expected result; None if none is expected."""


class CollectiveRow(Record):
    """The results of a collective at one size; ``out_of_place`` is None for all_reduce, which torch runs in place."""

    collective: Collective
    size_bytes: int
    count: int
    out_of_place: Way | None
    in_place: Way | None


class NotTimed(Record):
    """A collective that could not be measured at ``size_bytes`` or more or, if that is None, at any size."""

    collective: Collective
    size_bytes: int | None
    reason: str
    out_of_memory: bool = False


class RankReport(Record):
    """A rank and its device."""

    rank: int
    node: str
    local_rank: int
    pid: int
    device: str
    bus_id: str | None
    """Bus id of the GPU, such as ``0000:04:00``."""


class CollectiveResult(Record):
    """The results of measuring collectives, as rank 0 writes them."""

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
    """The numbers of elements of one call on a rank; ``count`` is NCCL's argument, which may count only one part."""

    count: int
    sent: int
    received: int

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole array in bytes, from which bandwidths are computed."""
        return max(self.sent, self.received) * ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` values in a buffer from index ``at``; value i is ``((offset + i) % BASES + 1) * weight``."""

    at: int
    count: int
    offset: int
    weight: int


def extent(collective: Collective, size_bytes: int, ranks: int) -> Extent:
    """Return the extent of a call, with the size rounded down to equal parts if the data is divided among ranks."""
    if collective in ("all_reduce", "sendrecv"):
        count = size_bytes // ELEMENT_BYTES
        return Extent(count, count, count)
    part = size_bytes // ELEMENT_BYTES // ranks // (ALIGNED // ELEMENT_BYTES) * (ALIGNED // ELEMENT_BYTES)
    whole = part * ranks
    sent = part if collective == "all_gather" else whole
    return Extent(part, sent, part if collective == "reduce_scatter" else whole)


def extents(collective: Collective, sizes: tuple[int, ...], ranks: int) -> list[Extent]:
    """Return the extents for all sizes, without empty and duplicate ones."""
    extents = (extent(collective, size, ranks) for size in sizes)
    return list(dict.fromkeys(one for one in extents if one.count))


def sizes_between(least: int, most: int, factor: int) -> Iterator[int]:
    size = least
    while size <= most:
        yield size
        size *= factor


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as defined by nccl-tests (PERFORMANCE.md)."""
    if collective == "sendrecv":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def algorithm_gb_per_s(size_bytes: int, seconds: float) -> float:
    return size_bytes / 1e9 / seconds


def sent_data(size: Extent, rank: int) -> Piece:
    """Return the data that a rank sends."""
    return Piece(0, size.sent, 0, _weight(rank))


def expected_data(collective: Collective, size: Extent, rank: int, ranks: int) -> list[Piece]:
    """Return the data that a rank must receive."""
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

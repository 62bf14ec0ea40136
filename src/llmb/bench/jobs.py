# SPDX-License-Identifier: Apache-2.0
"""The protocol of the program that measures: a file with one job in, progress on standard output, a file with the
timings out. ``python -m llmb.bench.worker.run JOB_FILE RESULT_FILE``."""

from typing import Annotated, Literal

from pydantic import Field

from llmb.catalogue.records import Record
from llmb.predict.work import TrainingPass
from llmb.runs.attention import AttentionChoice
from llmb.runs.host import Device

PROGRAM = "llmb.bench.worker.run"
ProductDtype = Literal["bf16", "fp16", "fp32", "fp8"]
Direction = Literal["forward", "backward", "both"]
DIRECTIONS: dict[Direction, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of attention, of a forward pass. It has two products, the backward pass five: it computes the scores again."""
PASSES: tuple[TrainingPass, ...] = ("forward", "input_gradient", "weight_gradient")


class ProductCase(Record):
    """A layer's matrix product in one of its training passes, of [m, k] inputs with [n, k] weights.

    ``forward`` gives [m, n], ``input_gradient`` [m, k] and ``weight_gradient`` [n, k]; each is 2mkn FLOPs.
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
    """Causal attention of whole sequences. ``both`` is a forward pass with its backward pass."""

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
        """FLOPs of the causal half of all pairs of tokens; see ``DIRECTIONS``."""
        return DIRECTIONS[self.direction] * 2 * self.batch * self.heads * self.seq_len**2 * self.head_dim


class CopyCase(Record):
    """Copies so many bytes within the device's memory: that many are read, and as many are written."""

    kind: Literal["copy"] = "copy"
    size_bytes: int


class TransferCase(Record):
    """Copies so many bytes between host and device; ``pinned`` memory cannot be paged out."""

    kind: Literal["transfer"] = "transfer"
    size_bytes: int
    direction: Literal["host_to_device", "device_to_host"]
    pinned: bool


class LaunchCase(Record):
    """One addition to one number.

    ``host``: the host's time to queue it; on a CPU that of the whole operation. ``device``: the device's time for each
    of many in its queue. ``graph``: likewise of a CUDA graph. ``round_trip``: queueing one and waiting for it.
    """

    kind: Literal["launch"] = "launch"
    way: Literal["host", "device", "graph", "round_trip"]


Work = Annotated[ProductCase | AttentionCase | CopyCase | TransferCase | LaunchCase, Field(discriminator="kind")]


class Case(Record):
    """What is timed, and its name for progress and errors."""

    name: str
    work: Work
    sustained_s: float | None = None
    """Repeat for so long, and take the last part; None for a burst."""


class CaseList(Record):
    """Bursts end after ``enough_s`` or ``most_repeats``, and have at least ``least_repeats``."""

    device: Device
    cases: tuple[Case, ...]
    warm_ups: int = 2
    least_repeats: int = 3
    most_repeats: int = 20
    enough_s: float = 0.08


class Timing(Record):
    """Seconds of one case: the median of ``repeats``, and their minimum and maximum; None with a ``reason``."""

    seconds: float | None
    fastest: float | None = None
    slowest: float | None = None
    repeats: int = 0
    backend: str | None = None
    reason: str | None = None
    out_of_memory: bool = False


class DeviceReport(Record):
    """What measured."""

    python: str
    torch: str
    cuda: str | None
    cudnn: str | None
    cudnn_number: int | None
    """As torch has it, such as 91002."""
    nccl: str | None
    driver: str | None
    device: str
    device_memory_gib: float | None
    cpu_threads: int


class Timings(Record):
    """The result of a job, in the order of its cases."""

    device: DeviceReport
    timings: tuple[Timing, ...]


class BenchProgress(Record):
    """One line of standard output: what is measured next, its number from 0, and how many there are.

    seconds: how long it takes at least, if that was asked for.
    """

    name: str
    number: int
    total: int
    seconds: float | None = None

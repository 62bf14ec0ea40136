# SPDX-License-Identifier: Apache-2.0
"""The comparison's document. benchmarks/README.md lists its keys."""

from typing import Any, Literal

from benchmarks.engine.published import Target
from benchmarks.engine.shapes import Floor
from llmb.catalogue.records import Dtype, Record

Status = Literal["done", "failed", "not_run", "stopped"]
"""``stopped``: at its time limit; never in a document."""


class CaseResult(Record):
    """One case as flat values. Figures are None if the case has none; ``reason`` then has the reason."""

    engine: str
    variant: str | None = None
    engine_version: str | None
    model: str
    workload: str
    size: str
    dtype: Dtype
    gpu_type: str
    proxy: bool
    layers: int
    vocab_size: int
    experts: int | None
    parameters: int
    mbs: int
    ga: int
    gbs: int
    seq_len: int
    round: int
    status: Status
    reason: str | None = None
    outdated: str | None = None
    log_tail: str | None = None
    code: str
    conventions: tuple[str, ...] = ()
    started_at: str | None = None
    wall_s: float | None = None
    step_times_s: tuple[float, ...] = ()
    step_time_s: dict[str, Any] | None = None
    tokens_per_s: float | None = None
    tflops: dict[str, float | None] | None = None
    mfu_pct: dict[str, float | None] | None = None
    peak_tflops: float | None = None
    published_mfu_pct: float | None = None
    product_share_pct: float | None = None
    kernel_share_pct: float | None = None
    sustained_share_pct: float | None = None
    peak_memory_gib: float | None = None
    loss: dict[str, float] | None = None
    breakdown: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return *self.setup, self.round

    @property
    def setup(self) -> tuple[str, str | None, str, Dtype, int]:
        """What rounds repeat."""
        return self.engine, self.variant, self.model, self.dtype, self.ga

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}" if self.variant else self.engine

    @property
    def label(self) -> str:
        return f"{self.name} {self.model} {self.dtype}, {self.ga} micro-batches"


class Published(Target):
    """The figure that results of a model and dtype are compared with."""

    model: str
    dtype: Dtype


class Ceilings(Record):
    """The measured speed of the device's own kernels, and the resulting floors of each model. ``measured`` is raw."""

    measured: dict[str, Any] | None
    floors: tuple[Floor, ...] = ()
    reason: str | None = None

    def floor(self, model: str, dtype: Dtype) -> Floor | None:
        return next((floor for floor in self.floors if (floor.name, floor.dtype) == (model, dtype)), None)


class Verdict(Record):
    """One target of one model and dtype. ``margin_pct`` is how far llmb is above ``target``.

    ``rounds_differ_pct``: the difference of an engine's rounds, of the engine where it is largest.
    """

    model: str
    dtype: Dtype
    shows: Literal["published_mfu", "other_engine"]
    against: str
    micro_batches: int
    verdict: Literal["reached", "not_reached", "not_measured"]
    measured: float | None
    target: float | None
    margin_pct: float | None
    rounds_differ_pct: float | None = None
    reason: str | None


class Settings(Record):
    """Everything but the code that determines the figures; a document holds results of one set of settings."""

    gpu_type: str
    device: str
    torch: str | None
    tiny: bool
    warmup_steps: int
    steps: int
    seed: int
    compiled: bool
    llmb_options: str
    expandable_segments: bool


class Document(Record):
    """The full result of a comparison."""

    schema_version: Literal[2] = 2
    kind: Literal["engine-comparison"] = "engine-comparison"
    settings: Settings
    environment: dict[str, Any]
    ceilings: Ceilings | None = None
    published: tuple[Published, ...] = ()
    cases: tuple[CaseResult, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

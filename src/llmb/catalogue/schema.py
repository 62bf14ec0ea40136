# SPDX-License-Identifier: Apache-2.0
"""Schema of the catalogue's data files."""

from math import log1p
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llmb.catalogue.published import Checkpoint, Document, Figures, PublishedCondition, Source
from llmb.catalogue.records import Dtype, Fabric, Gpu, Lora, Packing, ParallelSizes, Recipe, Record, Training


class HardwareFile(Record):
    """The content of ``hardware.yaml``."""

    gpus: tuple[Gpu, ...]


class Prior(Record):
    """The estimate of a rate before it is fitted to published steps."""

    mean: float
    deviation: float = Field(gt=0)


class StepRate(Record):
    """A factor, a fraction or a time in seconds, see ``prediction.step_time.Rates``; with its prior, if any."""

    value: float = Field(ge=0)
    prior: Prior | None = None
    source: str


Share = Annotated[float, Field(ge=0, le=1)]


class SoftwareRates(Record):
    """The overlap and fusion of training software; ``tp``, ``tp_fp8``, ``cp`` and ``attention`` replace rates of that
    name."""

    tp: Share | None = None
    tp_fp8: Share | None = None
    cp: Share | None = None
    pp: Share
    ep: Share
    """Share of hidden messages that still delays a rank, like ``tp``, ``cp`` and ``pp``."""
    ep_hidden: Share
    """Share of concurrent work that hides messages of experts."""
    dp_hidden: Share
    """Share of concurrent work that hides messages of gradients and parameters."""
    ep_joins_copies: bool
    """True if a token crosses the network once for all experts of a node."""
    tp_gathers_casts: bool = False
    """True if gradients are cast to FP8 before they are gathered."""
    replays_graphs: bool = False
    """True if CUDA graphs replay steps, provided that the recipe uses them."""
    unfused: float = Field(ge=1)
    """Factor of the bytes of operators between products."""
    attention: float | None = Field(default=None, ge=1)
    source: str


class ExpectedError(Record):
    """95 % of steps are between ``shorter_pct`` percent shorter and ``longer_pct`` percent longer than predicted."""

    text: str
    shorter_pct: float = Field(gt=0, lt=100)
    longer_pct: float = Field(gt=0)
    rows: int | None = None
    """Number of published steps with which the error was measured; None if it is assumed."""
    source: str

    @property
    def log_errors(self) -> tuple[float, float]:
        """Both errors as logarithms, in which independent errors add in quadrature."""
        return -log1p(-self.shorter_pct / 100), log1p(self.longer_pct / 100)


class FittedRate(Record):
    """A fitted rate's relative standard deviation, and its correlations; each pair of rates is listed only once."""

    deviation: float = Field(gt=0)
    correlations: dict[str, float] = Field(default={})


class RatesFile(Record):
    """The content of ``rates.yaml``."""

    rates: dict[str, StepRate]
    links: dict[str, StepRate]
    software: dict[str, SoftwareRates]
    errors: dict[str, ExpectedError]
    fits: dict[str, dict[str, FittedRate]]
    """Uncertainties of rates that were fitted together: by the published steps' software, then by the rate's name or,
    for ``relative_efficiency``, by the GPU types' names."""


class ModelFile(Record):
    """The content of ``models/<model>.yaml``. Keys of a size take precedence over ``common``."""

    model: str
    source: str
    common: dict[str, Any]
    sizes: dict[str, dict[str, Any]]


class DocumentsFile(Record):
    """The content of ``documents.yaml``."""

    documents: tuple[Document, ...]


class GpuKind(Record):
    """A selection of GPU types by their properties, so that new types are included automatically."""

    min_memory_gb: float = 0
    below_memory_gb: float = float("inf")
    nvlink_c2c: bool = False
    """True to select only GPU types with this property."""

    def holds_for(self, gpu: Gpu) -> bool:
        return self.min_memory_gb <= gpu.memory_gb < self.below_memory_gb and (gpu.nvlink_c2c or not self.nvlink_c2c)


class LayoutRow(ParallelSizes):
    """One row of a layout table. ``dp`` and ``ga`` are as printed, and must agree with the other columns."""

    line: int | None = None
    gpus: int
    layers: int
    dp: int | None = None
    mbs: int
    gbs: int
    ga: int | None = None
    proxy: bool = False
    vocab_size: int | None = None
    experts: int | None = None


class BatchRule(Record):
    """A rule for scales above ``gpus``: the global batch size is proportional to the number of GPUs."""

    gpus: int
    gbs: int
    line: int | None = None
    """None for a rule of llmb itself."""


class LayoutTable(Record):
    """Layouts of one size; a table without a release was not published."""

    size: str
    model_size: str | None = None
    """Size of the model that the document trains under this name, if the model's size differs from ``size``."""
    release: str | None = None
    document: str | None = None
    gpu_types: tuple[str, ...] = ()
    gpus_with: GpuKind | None = None
    """More GPU types that the table applies to."""
    dtypes: tuple[Dtype, ...]
    seq_len: int
    above_largest: Literal["double", "refuse", "any"]
    """Scales beyond the rows: doublings of the largest, none, or any number with the same batch."""
    batch_rule: BatchRule | None = None
    counts_embedding_and_loss: bool = False
    vocab_size: int | None = None
    """The vocabulary size after the framework's padding; None for the model's vocabulary size."""
    notes: tuple[str, ...] = ()
    rows: tuple[LayoutRow, ...]

    @model_validator(mode="after")
    def _is_for_something(self) -> Self:
        if not self.gpu_types and self.gpus_with is None:
            raise ValueError("gpu_types or gpus_with is required: the GPU types of the layouts")
        return self


class FlopsEntry(Record):
    """How a document counts the FLOPs of a size; ``printed_flops`` applies only to these layers and this length."""

    size: str
    document: str
    seq_len: int
    layers: int | None = None
    printed_flops: float | None = None
    line: int | None = None
    formula: Literal["full", "causal", "two thirds of causal"]
    as_published: dict[str, int] = Field(default_factory=dict)
    """Wrong sizes in the document, used only for its own formula."""
    notes: tuple[str, ...] = ()


class CheckpointEntry(Record):
    """A checkpoint size as printed."""

    size_gb: float
    save_scales: tuple[int, int] | None = None
    min_load_scale: int | None = None
    document: str
    line: int
    notes: tuple[str, ...] = ()

    def record(self, source: str) -> Checkpoint:
        return Checkpoint(source=source, **self.model_dump(exclude={"document"}))


class LoraEntry(Lora):
    """The adapters of a workload."""

    source: str

    def record(self) -> Lora:
        return Lora(**self.model_dump(exclude={"source"}))


class CapacityEntry(Record):
    """Rows of each routed expert relative to an equal share of a rank's tokens x top-k."""

    factor: float = Field(gt=0)
    source: str


class PackingEntry(Packing):
    """Packing statistics at one sequence length."""

    seq_len: int


class FabricsFile(Record):
    """The content of ``fabrics.yaml``."""

    fabrics: tuple[Fabric, ...]


class JobEntry(Record):
    """A selection of the recipes that an entry applies to; an omitted key matches all."""

    release: str | None = None
    sizes: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    gpu_types: tuple[str, ...] = ()
    gpus_with: GpuKind | None = None
    """Further GPU types of the entry; with this key, it applies to CPUs only if ``gpu_types`` includes them."""
    min_scale: int = 1
    pipelined: bool = False
    """True to select only layouts with pipeline parallelism."""
    source: str

    def holds_for(self, recipe: Recipe) -> bool:
        return (
            self.release in (None, recipe.release)
            and recipe.size in (self.sizes or (recipe.size,))
            and recipe.dtype in (self.dtypes or (recipe.dtype,))
            and recipe.gpu_type in (self.gpu_types or (recipe.gpu_type,))
            and recipe.scale >= self.min_scale
            and (recipe.layout.pp > 1 or not self.pipelined)
        )


class TimeLimitEntry(JobEntry):
    """Time limit of a job."""

    minutes: int


class VariablesEntry(JobEntry):
    """Environment variables of the workers; a later entry replaces values of earlier ones."""

    variables: dict[str, str]


class VboostEntry(JobEntry):
    """The level of ``nvidia-smi boost-slider`` that the published jobs set on nodes that allow it."""

    level: int


class JobsEntry(Record):
    """Defaults of a workload's jobs. The first time limit and the first vboost that match are used."""

    time_limits: tuple[TimeLimitEntry, ...]
    variables: tuple[VariablesEntry, ...] = ()
    vboost: tuple[VboostEntry, ...] = ()

    @model_validator(mode="after")
    def _every_recipe_has_a_time_limit(self) -> Self:
        selecting = {"release", "sizes", "dtypes", "gpu_types", "gpus_with", "min_scale", "pipelined"}
        if not self.time_limits or selecting & self.time_limits[-1].model_fields_set:
            raise ValueError("the last time limit must apply to every recipe")
        return self


class WorkloadFile(Record):
    """The content of ``workloads/<workload>.yaml``."""

    workload: str
    title: str
    task: Literal["pretrain", "lora", "sft"]
    model: str
    experiments: dict[str, str] = Field(default_factory=dict)
    """The prefix of the reference suite's experiment names, by size; by default the workload and the size."""
    borrowed_layouts: dict[str, str] = Field(default_factory=dict)
    """GPU types without layouts, each with the type to borrow layouts from; overrides ``hardware.yaml``."""
    training: dict[str, dict[str, Any]]
    lora: LoraEntry | None = None
    """Adapters of a workload whose task is lora."""
    capacity_factor: CapacityEntry | None = None
    """Capacity factor of a workload that drops tokens."""
    packing: tuple[PackingEntry, ...] = ()
    published_flops: tuple[FlopsEntry, ...]
    checkpoints: dict[str, CheckpointEntry]
    sources: dict[str, Source] = Field(default_factory=dict)
    """The sources by size, for a workload that needs prepared weights and data."""
    jobs: JobsEntry
    layouts: tuple[LayoutTable, ...]

    @model_validator(mode="after")
    def _lora_has_adapters(self) -> Self:
        if (self.lora is None) is (self.task == "lora"):
            raise ValueError("lora is required if the task is lora, and only then")
        return self

    def training_for(self, size: str) -> Training:
        return Training(**{**self.training["common"], **self.training.get(size, {})})


class FigureRow(Figures):
    """Figures of one scale."""

    gpus: int
    notes: tuple[str, ...] = ()


class FigureTable(Record):
    """One table of published figures; ``lines`` has the document's line for each kind of figure."""

    size: str
    dtype: Dtype
    gpu_type: str
    lines: dict[str, int]
    peak_tflops: float
    notes: tuple[str, ...] = ()
    rows: tuple[FigureRow, ...]


class Example(FigureRow):
    """A figure from a document's prose."""

    size: str
    dtype: Dtype
    gpu_type: str | None
    line: int
    peak_tflops: float | None


class ConditionEntry(PublishedCondition):
    """A condition and the figures that it applies to; an omitted key matches all of them."""

    workloads: tuple[str, ...] = ()
    """The workloads that the condition applies to, if the document has several."""
    sizes: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    gpu_types: tuple[str, ...] = ()

    def holds_for(self, workload: str, size: str, dtype: str, gpu_type: str | None) -> bool:
        selected = (self.workloads, workload), (self.sizes, size), (self.dtypes, dtype), (self.gpu_types, gpu_type)
        return all(not allowed or value in allowed for allowed, value in selected)

    def record(self) -> PublishedCondition:
        return PublishedCondition(**self.model_dump(exclude={"workloads", "sizes", "dtypes", "gpu_types"}))


class PublishedFile(Record):
    """The content of ``expectations/<document>.yaml``."""

    document: str
    workload: str
    conditions: tuple[ConditionEntry, ...] = ()
    tables: tuple[FigureTable, ...] = ()
    examples: tuple[Example, ...] = ()

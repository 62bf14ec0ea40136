# SPDX-License-Identifier: Apache-2.0
"""The content of the reference documents: figures, profiles, folders, and the sources of weights and data."""

from typing import Literal

from pydantic import Field

from llmb.base.record import Record


class DocumentProfile(Record):
    """The steps from ``start`` that a document profiles; ``stop`` is not profiled, and ends the run."""

    start: int
    stop: int
    file: str | None = None
    """Name of a rank's report, without its ending; None for llmb's own."""


class DocumentResults(Record):
    """The places of a run by a document's launch script, as templates of paths below the install root."""

    experiment: str
    folders: tuple[str, ...]
    """Folders of the log; the first one also contains the files below."""
    nsys_profile: str | None = None
    checkpoint: str | None = None
    """The folder above ``weights``."""


class Document(Record):
    """A source of published figures: the steps behind them, and the profiled steps."""

    document: str
    title: str
    source: str
    release: str
    window: str | None
    """None if it does not state the steps."""
    window_reason: str | None = None
    profile: DocumentProfile | None = None
    """None if it profiles no steps."""
    nccl_trace_in_log: bool = False
    """True if the log of a traced run has NCCL's lines."""
    results: DocumentResults | None = None
    """None if it names the folders like llmb."""
    averaged_steps: int = 1
    """The number of steps that each printed step time averages."""
    experiments: tuple[str, ...] = ()
    """Workloads, or workloads and sizes, as prefixes of its experiments' names."""
    convention: str
    framework: str
    """The software with which the document's runs trained."""
    data: Literal["synthetic", "squad"] | None = None
    """The data of the document's training; None if it does not state it."""
    notes: tuple[str, ...] = ()


class PublishedCondition(Record):
    """How a published run trained, if a run here may train differently."""

    key: str
    """A key of the verdict's conditions."""
    value: str | None
    """None if it is not known; the source then says why."""
    slower_pct: tuple[float, float] | None = None
    """The slowdown of a step without it, in percent, from and to. Estimates from sizes; None if unknown."""
    what: str
    """A description, and the source of the estimate."""
    source: str
    """File, line and commit of the code that ran."""


class Figures(Record):
    """Figures of one run that a document prints; None if it omits one."""

    step_time_s: float
    step_time_std_s: float | None = None
    """Standard deviation of the window's steps, over the population, as printed by the document's script."""
    tokens_per_s: float | None
    mfu_pct: float | None = Field(gt=0, le=100)
    days_per_1t_tokens: float | None
    tflops_per_gpu: float | None = None


class Expectation(Figures):
    """A published figure, as published."""

    kind: Literal["table", "example"]
    convention: str
    peak_tflops: float | None
    """The peak FLOP rate behind the document's MFU column."""
    source: str
    line: int
    release: str
    window: str | None
    window_reason: str | None = None
    """The reason if the document does not state the steps."""
    notes: tuple[str, ...]
    averaged_steps: int = 1
    """The number of steps that a printed step time averages."""
    gpu_type_stated: bool = True
    """False if the document does not state the figure's GPU type."""

    @property
    def window_text(self) -> str | None:
        mean = f", a mean of {self.averaged_steps}" if self.averaged_steps != 1 else ""
        return None if self.window is None else f"{self.window}{mean}"


class PublishedFlops(Record):
    """The reference document's way of counting the model FLOPs of one sequence."""

    formula: Literal["full", "causal", "two thirds of causal"]
    as_published: dict[str, int] = Field(default_factory=dict)
    """Wrong sizes in the document, used only for its own formula."""
    printed_flops: float | None
    """The document's printed value for this depth and sequence length, if any."""
    source: str
    line: int | None
    notes: tuple[str, ...] = ()


class Checkpoint(Record):
    """Checkpoint sizes in the documents, and the numbers of GPUs that save and load them there."""

    size_gb: float
    save_scales: tuple[int, int] | None = None
    """The smallest and the largest."""
    min_load_scale: int | None = None
    source: str
    line: int
    notes: tuple[str, ...] = ()


class Source(Record):
    """The source of the weights and the data of a fine-tuning."""

    model: str
    """Folder of the checkpoint below ``models/``, and its repository on the Hugging Face hub if it has one."""
    page: str | None
    """The page to request access to the repository; None for a model that is not on the hub."""
    dataset: Literal["squad", "squad-tiny"]
    """Folder below ``datasets/``. A tiny model has its own: its few samples must never be mistaken for SQuAD."""
    document: str | None = None
    line: int | None = None
    notes: tuple[str, ...] = ()

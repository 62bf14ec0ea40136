# SPDX-License-Identifier: Apache-2.0
"""Records of the reference documents: figures, conditions, profiles, folders, and sources of weights and data."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llmb.base.record import Record


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read it as 1 or 0
        raise PydanticCustomError("number", "it must be a number")
    return value


Number = BeforeValidator(_number)
Positive = Annotated[float, Field(gt=0, lt=1e30), Number]


class DocumentProfile(Record):
    """The steps from ``start`` that a document profiles; ``stop`` is not profiled, and ends the run."""

    start: int
    stop: int
    file: str | None = None
    """Template of the name of a rank's report, without the file extension; None if llmb names it."""


class DocumentResults(Record):
    """Templates of the paths at which a document's script leaves a run; ``folders`` are below the install root."""

    experiment: str
    folders: tuple[str, ...]
    """Folders of the log; the first one also contains the profile and the checkpoint."""
    nsys_profile: str | None = None
    checkpoint: str | None = None
    """The folder above ``weights``."""


class Document(Record):
    """A reference document: its source, how its runs trained, and the steps that it averages and profiles."""

    document: str
    title: str
    source: str
    release: str
    window: str | None
    """The steps behind the figures; None if the document does not state them."""
    window_reason: str | None = None
    profile: DocumentProfile | None = None
    """None if the document profiles no steps."""
    nccl_trace_in_log: bool = False
    """True if the log of a traced run has NCCL's lines."""
    results: DocumentResults | None = None
    """None if the document's folders have llmb's names, or if the document names no folders."""
    averaged_steps: int = 1
    """The number of steps that each printed step time averages."""
    experiments: tuple[str, ...] = ()
    """Prefixes of the names of the document's experiments."""
    convention: str
    framework: str
    """The software with which the document's runs trained."""
    data: Literal["synthetic", "squad"] | None = None
    """The data of the document's runs; None if the document does not state them."""
    notes: tuple[str, ...] = ()


class PublishedCondition(Record):
    """A condition of a published run that may differ in a run here."""

    key: str
    """A key of the verdict's conditions."""
    value: str | None
    """None if the value is unknown; ``source`` then has the reason."""
    slower_pct: tuple[float, float] | None = None
    """The estimated slowdown of a step without the condition, as a range in percent; None if unknown."""
    what: str
    """A description, with the source of the estimate, if any."""
    source: str
    """The code or the document that states the value."""


class Figures(Record):
    """The figures of one run in a document; None for a figure that the document omits."""

    step_time_s: Positive
    step_time_std_s: float | None = None
    """Population standard deviation of the window's steps, as printed by the document's script."""
    tokens_per_s: Positive | None
    mfu_pct: Annotated[Positive, Field(le=100)] | None
    days_per_1t_tokens: Positive | None
    tflops_per_gpu: float | None = None


class Expectation(Figures):
    """A published figure with its source, and how it was measured."""

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
    """How the reference document counts the model FLOPs of one sequence."""

    formula: Literal["full", "causal", "two thirds of causal"]
    as_published: dict[str, int] = Field(default_factory=dict)
    """Wrong sizes of the document, used only in its own formula."""
    printed_flops: float | None
    """The document's printed value for this depth and sequence length, if any."""
    source: str
    line: int | None
    notes: tuple[str, ...] = ()


class Checkpoint(Record):
    """The size of a checkpoint in the documents, and the numbers of GPUs that saved and loaded the checkpoint."""

    size_gb: float
    """The printed number of GB; the files have that number of GiB."""
    save_scales: tuple[int, int] | None = None
    """The smallest and the largest number of GPUs that saved the checkpoint."""
    min_load_scale: int | None = None
    source: str
    line: int
    notes: tuple[str, ...] = ()


class Source(Record):
    """The source of the weights and the data for fine-tuning."""

    model: str
    """Folder of the checkpoint below ``models/``, and its repository on the Hugging Face hub if it has one."""
    page: str | None
    """The page where users request access to the repository; None for a model that is not on the hub."""
    dataset: Literal["squad", "squad-tiny"]
    """Folder below ``datasets/``. Tiny models have a separate folder: their few samples must never pass for SQuAD."""
    document: str | None = None
    line: int | None = None
    notes: tuple[str, ...] = ()

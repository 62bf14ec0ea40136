# SPDX-License-Identifier: Apache-2.0
"""The result of a run: its status with a reason, its measurements, and a verdict with its basis."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import WrapValidator

from llmb.base.missing import Missing
from llmb.base.record import ReasonedRecord, ValidateOnce
from llmb.base.statistics import Statistics
from llmb.catalogue.records import Packing, Record, Window
from llmb.readers.samples.machine import MachineReport
from llmb.readers.samples.sample_records import OtherWork, ResourceUse
from llmb.runs.attention_choice import AttentionBackend, Fp8Product
from llmb.runs.checkpoint_use import CheckpointReport
from llmb.runs.choices import Fp8Recipe
from llmb.runs.environment import DeviceMemory
from llmb.runs.steps import Counters
from llmb.runs.trace_reports import NetworkUse, ProfileReport

Status = Literal["queued", "running", "success", "failed", "invalid", "cancelled"]
NOT_SUCCESSFUL = Missing("the run was not successful")
"""The reason why an unsuccessful run has no measurements."""
NOT_SAMPLED = Missing("the run was not sampled")
NO_SAMPLES = Missing("the run folder has no samples")
NO_EXPERTS = Missing("the model has no experts")
VerdictName = Literal["pass", "regressed", "improved", "inconclusive", "invalid", "not comparable"]
ReferenceKind = Literal["published", "baseline", "expectation", "prediction"]
Effect = Literal["prevents", "weakens", "noted"]
Interval = tuple[float, float]
NETWORK_FAULT = "network_fault"
MACHINE_FAULT = "machine_fault"
OTHER_WORK = "other_work"
UNLIKE_NODES = "unlike_nodes"
CHANGED_COPY = "changed_copy"
ERROR_AT_END = "error_at_end"
Faults = Mapping[str, tuple[str, ...]]
"""The disturbances of a run, by the key of their conditions, the most important first."""


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The balance of a layer with experts: means over the window's steps. ``layer`` is its index in the model."""

    layer: int
    max_over_mean: float
    """Tokens of the busiest expert divided by the mean; 1 is balanced."""
    rank_max_over_mean: float
    """Rows that the fullest rank computes for its experts, divided by the mean over the ranks that exchange tokens."""


@dataclass(frozen=True, slots=True)
class ExpertLoadReport:
    """The balance of tokens between experts: means over the steps of the window."""

    max_over_mean: float
    idle_experts: float
    forced: bool
    """True if tokens were routed evenly, independent of the routers."""
    capacity_factor: float | None = None
    """None if tokens are never dropped."""
    dropped_pct: float = 0.0
    """Percentage of the routed tokens that were dropped, because their experts were full."""
    rank_max_over_mean: float | None = None
    """Mean over all layers with experts; None, and ``layers`` empty, for a run that did not record it."""
    layers: tuple[LayerLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class Fp8Report:
    """The FP8 computation of a run; numbers of tensors are means over the steps of the window."""

    recipe: Fp8Recipe
    emulated: bool
    saturated_tensors: float
    not_finite_tensors: float
    product: Fp8Product | None = None
    """None if it was not recorded."""


class Loss(Record):
    """Losses of the first and the last step."""

    first: float
    last: float


class Parameters(Record):
    """Numbers of parameters; ``active`` counts the parameters for one token: of the routed experts, only the top-k."""

    total: int
    active: int
    trainable: int


class PretendedRank(ReasonedRecord):
    """Measurements of a rank that ran alone; ``compute_time_s`` excludes waits, but includes copies that replace
    collectives.
    """

    rank: int
    ranks: int
    pp_stage: int
    """The rank's pipeline stage, from 0."""
    micro_batches: int
    compute_time_s: Statistics | Missing
    peak_memory_gib: float | None


class Reference(Record):
    """The step time that a run is judged against."""

    kind: ReferenceKind
    step_time_s: float
    step_time_s_ci95: Interval | None = None
    """None if the reference has no interval."""
    window: Window | None = None
    """None if the steps are unknown, differ between runs, or are only in ``window_text``."""
    window_text: str = ""
    """The window as text; empty if unknown."""
    convention: str | None = None
    """The convention by which the source counts FLOPs; None if it has only a step time."""
    source: str
    """A document and its line, a baseline with its runs, the user's file and its line, or a prediction."""
    runs: int | None = None
    """Number of runs of a baseline, or of an expectation that states it; else None."""


class Condition(Record):
    """A difference between a run and its reference, or a fault of either; None if that side reports none."""

    key: str
    """For example ``software.driver``."""
    own: str | None
    reference: str | None
    effect: Effect
    """The difference prevents a verdict, makes it soft, or is only noted."""
    slower_pct: Interval | None = None
    """The smallest and the largest slowdown of a step that the condition causes, in percent; None if unknown."""
    why: str | None = None
    """The explanation, with its source, if the reference has one."""


class Verdict(Record):
    """A verdict on one or several runs. The keys are part of the public interface."""

    verdict: VerdictName
    soft: bool
    """True if the runs, the reference, or a condition that differs allow only a rough statement."""
    delta_pct: float | None = None
    """Difference of the step time from the reference, in percent; above 0 is slower. None if unknown."""
    ci95_pct: Interval | None = None
    """95 % confidence interval of ``delta_pct``."""
    smallest_visible_change_pct: float | None = None
    """The smallest slowdown that the data would have shown in 80 of 100 cases; None if there is no interval."""
    tolerance_pct: float | None = None
    tolerance_source: str | None = None
    reference: Reference | None = None
    conditions: tuple[Condition, ...] = ()
    more_runs: int | None = None
    """The expected number of further runs that would settle an inconclusive verdict; None if unknown, or not needed."""
    reason: str | None = None
    """The reason why there is no clear verdict, or why runs allow only a soft verdict."""
    sentence: str = ""
    """One line for display, derived from the other fields."""


WORST: tuple[VerdictName, ...] = ("regressed", "invalid", "inconclusive", "not comparable", "pass", "improved")
"""Verdicts from the worst to the best."""
BETTER: tuple[VerdictName, ...] = ("pass", "improved")
"""The verdicts in favor of a run."""


def worst(verdicts: Iterable[Verdict]) -> VerdictName:
    return min((verdict.verdict for verdict in verdicts), key=WORST.index)


class Result(ReasonedRecord):
    """Status, reason and measurements of a run; None if unavailable. The keys are part of the public interface."""

    status: Status
    reason: str | None
    steps: int
    step_time_s: Statistics | Missing
    loss: Loss | None
    peak_memory_gib: float | None
    device_memory: DeviceMemory | Missing = Missing("the free memory of GPUs was not recorded")
    """Missing on a CPU."""
    window: Window | None = None
    """The window of the statistics if it was determined after the run; None for the window of the plan."""
    measurement_reason: str | None = None
    """The reason why the statistics are not a measurement; None if they are one, or without statistics."""
    checkpoint: CheckpointReport | Missing | None = None
    """None for a run by another program, and for a run that neither loads nor saves a checkpoint."""
    profile: ProfileReport | None = None
    expert_load: ExpertLoadReport | Missing = Missing("the load of experts was not recorded")
    """Balance of the experts of a run by llmb's engine."""
    counters: Annotated[Counters, WrapValidator(ValidateOnce())] | None = None
    attention_backend: AttentionBackend | None = None
    fp8: Fp8Report | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    real_tokens_per_s: float | None = None
    """Rate without padding; equal to ``tokens_per_s`` if sequences are not packed."""
    packing: Annotated[Packing, WrapValidator(ValidateOnce())] | None = None
    """Statistics of the window's sequences or, if unknown, the recipe's; None if not packed, or without statistics."""
    parameters: Annotated[Parameters, WrapValidator(ValidateOnce())] | None = None
    """None if the run has no statistics."""
    tflops_per_gpu: dict[str, float | None] | None = None
    """The rate by FLOP convention; ``mfu_pct`` and ``flops_per_sequence`` have the same keys."""
    mfu_pct: dict[str, float | None] | None = None
    days_per_1t_tokens: float | None = None
    flops_per_sequence: Annotated[dict[str, float | None], WrapValidator(ValidateOnce())] | None = None
    peak_tflops: float | None = None
    reasons: Annotated[dict[str, str], WrapValidator(ValidateOnce())] | None = None
    """Reasons for fields that are None, by name."""
    verdict: Verdict | Missing = Missing("the run is not judged yet")
    """The verdict against the published step time."""
    note: str | None = None
    """The event after the last step of a success: an error, a signal, the time limit; else None."""
    error_at_end: str | None = None
    """The log's error after the last step of a success, except the time limit; it makes a verdict soft."""
    resources: ResourceUse | Missing = NOT_SUCCESSFUL
    """Use of resources in the steps of the window."""
    other_work: OtherWork | Missing = NOT_SUCCESSFUL
    """Other processes' work from before the window to after it; any item in ``disturbing`` makes a verdict soft."""
    untried: str | None = None
    """The note that the engine's version of torch was never tested; None if it was tested, or is unknown."""
    pretended: PretendedRank | None = None
    """None for a run of all ranks."""
    network: NetworkUse | Missing = Missing("the network was not recorded")
    """Network between nodes; its ``faults`` make a verdict soft."""
    machine: Annotated[MachineReport, WrapValidator(ValidateOnce())] | Missing = NOT_SAMPLED
    """The events on the nodes, also of a run that failed; its ``faults`` make a verdict soft."""

    @property
    def flaw(self) -> str | None:
        """The reason why the run is not a measurement; None if it is one."""
        times = self.step_time_s
        return self.reason or (times.reason if isinstance(times, Missing) else self.measurement_reason)

    @property
    def faults(self) -> dict[str, tuple[str, ...]]:
        """Return the disturbances of the run by the keys of their conditions, the most important first."""
        faults = {
            NETWORK_FAULT: self.network.faults if self.network else (),
            MACHINE_FAULT: self.machine.faults if self.machine else (),
            OTHER_WORK: self.other_work.disturbing if self.other_work else (),
            ERROR_AT_END: (self.error_at_end,) if self.error_at_end else (),
        }
        return {key: texts for key, texts in faults.items() if texts}

    @property
    def verdict_name(self) -> VerdictName | None:
        return self.verdict.verdict if self.verdict else None

    def document(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def without_figures(status: Status, reason: str | None, steps: int) -> Result:
    return Result(
        status=status, reason=reason, steps=steps, step_time_s=NOT_SUCCESSFUL, loss=None, peak_memory_gib=None
    )

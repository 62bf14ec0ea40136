# SPDX-License-Identifier: Apache-2.0
"""The result of a run: its status with a reason and its figures, concluded from what the run left behind. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import WrapValidator

from llmb.base.missing import Missing
from llmb.base.record import ReasonedRecord, ValidateOnce
from llmb.base.statistics import Statistics, describe
from llmb.catalogue.records import Packing, Record, Window
from llmb.catalogue.throughput import parameter_count, throughput, trainable_parameters, why_too_fast
from llmb.catalogue.window import STEADY
from llmb.readers.samples.machine import MachineReport, find_events
from llmb.readers.samples.other_work import find_other_work
from llmb.readers.samples.sample_records import OtherWork, ResourceUse
from llmb.readers.samples.samples import Sampled, SampledWork, TimeSpan, summarize
from llmb.runs.attention_choice import AttentionBackend, Fp8Product
from llmb.runs.checkpoint_use import CheckpointReport
from llmb.runs.choices import Fp8Recipe
from llmb.runs.environment import Environment, GpuState
from llmb.runs.failure import first_failure
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record_file import read_or_missing
from llmb.runs.steps import Counters, Step, count_steps
from llmb.runs.trace_reports import NetworkUse, ProfileReport
from llmb.runs.verdict import ERROR_AT_END, MACHINE_FAULT, NETWORK_FAULT, OTHER_WORK, Verdict, VerdictName

Status = Literal["queued", "running", "success", "failed", "invalid", "cancelled"]
NOT_SUCCESSFUL = Missing("the run was not successful")
"""The reason for the missing figures of such a run."""
NOT_SAMPLED = Missing("the run was not sampled")
NO_SAMPLES = Missing("the run folder has no samples")
NO_FIGURES = ("checkpoint", "profile", "counters", "attention_backend", "network", "machine")
"""The fields that an invalid run's result has, too."""
NOT_OF_ONE_RANK = ("loss", "peak_memory_gib", "tokens_per_s", "tflops_per_gpu", "mfu_pct", "days_per_1t_tokens")
"""Figures that a pretended rank cannot have."""
GIB = 2**30
MOST_PROFILED = 0.5
"""Maximum fraction of the window's steps that may be profiled and thus excluded for valid statistics."""


@dataclass(frozen=True, slots=True)
class ExpertLoadReport:
    """Means over the steps of the window."""

    max_over_mean: float
    idle_experts: float
    forced: bool
    """Tokens were routed evenly, independent of the routers."""
    capacity_factor: float | None = None
    """None if no token was dropped."""
    dropped_pct: float = 0.0
    """Share of the tokens that chose an expert which were beyond its capacity."""


@dataclass(frozen=True, slots=True)
class Fp8Report:
    """The FP8 computation; figures are means over the steps of the window."""

    recipe: Fp8Recipe
    emulated: bool
    saturated_tensors: float
    not_finite_tensors: float
    product: Fp8Product | None = None
    """None for a run that ended before it was chosen."""


class Loss(Record):
    """Losses of the first and the last step."""

    first: float
    last: float


class Parameters(Record):
    """Numbers of parameters; ``active`` counts only the experts that a token passes."""

    total: int
    active: int
    trainable: int


class PretendedRank(ReasonedRecord):
    """The measurements of a rank that ran alone, as if the others were there.

    compute_time_s: of a step, in which it waits for no other rank; with the copies that stand in for collectives.
    """

    rank: int
    ranks: int
    pp_stage: int
    """Its place in the pipeline, from 0."""
    micro_batches: int
    compute_time_s: Statistics | Missing
    peak_memory_gib: float | None


class Result(ReasonedRecord):
    """Status, reason and figures of a run; unavailable figures are None. The keys are a contract."""

    status: Status
    reason: str | None
    steps: int
    step_time_s: Statistics | Missing
    loss: Loss | None
    peak_memory_gib: float | None
    window: Window | None = None
    """The steps of the statistics, if that became known after the run; None for the window of the plan."""
    measurement_reason: str | None = None
    """Why the figures are not a measurement; None if they are, or if there are none."""
    checkpoint: CheckpointReport | Missing | None = None
    """None for a run that neither loads nor saves."""
    profile: ProfileReport | None = None
    expert_load: ExpertLoadReport | None = None
    counters: Annotated[Counters, WrapValidator(ValidateOnce())] | None = None
    attention_backend: AttentionBackend | None = None
    fp8: Fp8Report | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    real_tokens_per_s: float | None = None
    """Without padding; the same as ``tokens_per_s`` if sequences are not packed."""
    packing: Annotated[Packing, WrapValidator(ValidateOnce())] | None = None
    """Statistics of the sequences, of the steps of the window if they have them; None if they are not packed."""
    parameters: Annotated[Parameters, WrapValidator(ValidateOnce())] | None = None
    """None without figures."""
    tflops_per_gpu: dict[str, float | None] | None = None
    """The values by convention, as are ``mfu_pct`` and ``flops_per_sequence``."""
    mfu_pct: dict[str, float | None] | None = None
    days_per_1t_tokens: float | None = None
    flops_per_sequence: Annotated[dict[str, float | None], WrapValidator(ValidateOnce())] | None = None
    peak_tflops: float | None = None
    reasons: Annotated[dict[str, str], WrapValidator(ValidateOnce())] | None = None
    """Reasons for figures that are None, by name."""
    verdict: Verdict | Missing = Missing("the run is not judged yet")
    """Against the published figure."""
    note: str | None = None
    """The event after the last step of a success: an error, a signal, the time limit; else None."""
    error_at_end: str | None = None
    """The log's error after the last step of a success, except the time limit: a verdict is soft."""
    resources: ResourceUse | Missing = NOT_SUCCESSFUL
    """Use of resources in the steps of the window."""
    other_work: OtherWork | Missing = NOT_SUCCESSFUL
    """Around the window; its ``disturbing`` makes a verdict soft."""
    untried: str | None = None
    """Why its version of torch was never tried; None if it was, or is unknown."""
    pretended: PretendedRank | None = None
    """None for a run of all ranks."""
    network: NetworkUse | Missing = Missing("it was not recorded")
    """Between nodes; its ``faults`` make a verdict soft."""
    machine: Annotated[MachineReport, WrapValidator(ValidateOnce())] | Missing = NOT_SAMPLED
    """The events on the nodes, also of a run that failed; its ``faults`` make a verdict soft."""

    @property
    def flaw(self) -> str | None:
        """Why the run measures nothing; None if it is a measurement."""
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


def figures_of(plan: Plan, step_time_s: float, packing: Packing | None = None) -> dict[str, Any]:
    """Throughput and parameters as fields of a result, which has the step time with its spread.

    ``packing`` has the statistics of the sequences that were trained, if the steps have them.
    """
    measured = throughput(plan.recipe, step_time_s, lora=plan.lora, packing=packing)
    return {
        **{name: value for name, value in asdict(measured).items() if name != "step_time_s"},
        "packing": packing or plan.recipe.packing,
        "parameters": parameters_of(plan),
    }


def parameters_of(plan: Plan) -> Parameters:
    total, active = parameter_count(plan.recipe.model)
    return Parameters(total=total, active=active, trainable=trainable_parameters(plan.recipe.model, plan.lora))


def measured_packing(plan: Plan, steps: Sequence[Step]) -> Packing | None:
    """Mean statistics of the sequences of ``steps``; None if they have none."""
    squares = [step.sum_of_squares for step in steps if step.sum_of_squares is not None]
    if not steps or len(squares) < len(steps):
        return None
    sequences = len(steps) * plan.recipe.layout.gbs
    chunked = [
        whole if step.chunked_sum_of_squares is None else step.chunked_sum_of_squares
        for step, whole in zip(steps, squares, strict=True)
    ]
    return Packing(
        tokens=sum(step.tokens for step in steps) / sequences,
        sum_of_squares=sum(squares) / sequences,
        chunked_sum_of_squares=sum(chunked) / sequences if chunked != squares else None,
        source="mean of the window's steps",
    )


def no_measurement(plan: Plan, began: int | None = None) -> str | None:
    """Why figures of the window do not tell how fast the run is; None if they do.

    ``began`` is the first step of the attempt that trained the window, if not that of the run.
    """
    if plan.window.first > (plan.first_step if began is None else began):
        return None
    if began is not None and began > plan.first_step:
        return "the window includes the first step of an attempt, which includes warm-up"
    if plan.steps > 1:
        return "the window includes the first step, which includes warm-up"
    resumed = "; it shows that the checkpoint loads" if plan.start else ""
    return f"the only step is the first one, which includes warm-up{resumed}"


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """All that the result of a run is concluded from."""

    plan: EnginePlan
    """Its window is that of the statistics, also if its rule is ``auto``."""
    steps: Sequence[Step]
    exit_code: int = 0
    log_tail: str = ""
    interrupted: str | None = None
    """The outside cause that ended the run."""
    checkpoint: CheckpointReport | Missing | None = None
    profile: ProfileReport | None = None
    no_window: str | None = None
    """Why the steps of the window cannot be combined."""
    began: int | None = None
    """The first step of the attempt that trained the window, if not that of the run."""
    contradiction: str | None = None
    """Why the record of a run that did all its steps cannot be true."""
    environment: Environment | None = None
    samples: Sequence[Sampled] | Missing = NOT_SAMPLED
    """Samples of the resources in use."""


def without_figures(status: Status, reason: str | None, steps: int) -> Result:
    return Result(
        status=status, reason=reason, steps=steps, step_time_s=NOT_SUCCESSFUL, loss=None, peak_memory_gib=None
    )


def if_possible(result: Result) -> Result:
    """The result, which is invalid if no GPU of its type can have been so fast."""
    why = why_too_fast(result.tflops_per_gpu or {}, result.peak_tflops)
    if why is None:
        return result
    values = {name: getattr(result, name) for name in NO_FIGURES}
    return without_figures("invalid", why, result.steps).model_copy(update=values)


def conclude(evidence: RunEvidence) -> Result:
    """The result of a run, but for its verdict."""
    result = if_possible(_conclude(evidence))
    return result if evidence.plan.recipe.pretended_rank is None else _pretended(evidence.plan, result)


def _pretended(plan: Plan, result: Result) -> Result:
    """``result``, which takes a rank's steps for those of a run, with what they are: nothing else is known."""
    layout, rank = plan.recipe.layout, plan.recipe.pretended_rank
    assert rank is not None, "it is pretended"
    why = Missing(f"{plan.recipe.pretended_text}: other ranks did nothing")
    return Result(
        status=result.status,
        reason=result.reason,
        steps=result.steps,
        step_time_s=why if result.step_time_s else result.step_time_s,
        loss=None,
        peak_memory_gib=None,
        window=result.window,
        measurement_reason=result.measurement_reason,
        profile=result.profile,
        attention_backend=result.attention_backend,
        reasons=dict.fromkeys(NOT_OF_ONE_RANK, why.reason),
        resources=why,
        other_work=result.other_work,
        machine=result.machine,
        pretended=PretendedRank(
            rank=rank,
            ranks=layout.gpus,
            pp_stage=layout.pp * rank // layout.gpus,
            micro_batches=layout.ga,
            compute_time_s=result.step_time_s,
            peak_memory_gib=result.peak_memory_gib,
        ),
    )


def _conclude(evidence: RunEvidence) -> Result:
    plan, steps, window = evidence.plan, evidence.steps, evidence.plan.window
    status, reason = _status(evidence)
    inside = [step for step in steps if step.step in window]
    success = status == "success"
    statistics = statistics_of_window(plan, inside, evidence.no_window) if success else NOT_SUCCESSFUL
    inside = [step for step in inside if not step.profiled]
    resources, other_work = _used(evidence, inside, statistics)
    samples, nodes = evidence.samples, evidence.environment.nodes if evidence.environment else ()
    attention = evidence.environment and evidence.environment.attention
    return Result(
        status=status,
        reason=reason,
        steps=len(steps),
        step_time_s=statistics,
        loss=_loss(steps) if status != "invalid" else None,
        peak_memory_gib=max(step.peak_memory_bytes for step in steps) / GIB if steps else None,
        window=window if statistics and window.rule == STEADY else None,
        measurement_reason=no_measurement(plan, evidence.began) if statistics else None,
        checkpoint=evidence.checkpoint,
        profile=evidence.profile,
        expert_load=_expert_load(plan, inside) if statistics else None,
        counters=count_steps(steps),
        attention_backend=attention.backend if attention else None,
        untried=evidence.environment and evidence.environment.untried,
        fp8=_fp8(evidence, inside) if statistics else None,
        resources=resources,
        other_work=other_work,
        machine=machine_report(samples, nodes) if samples or isinstance(samples, Missing) else NO_SAMPLES,
        **(figures_of(plan, statistics.mean, measured_packing(plan, inside)) if statistics else {}),
    )


def machine_report(
    samples: Sequence[Sampled] | Missing, nodes: Sequence[str] = (), count: int | None = None
) -> MachineReport | Missing:
    """``nodes`` are all of the run, if they are known, and ``count`` at least how many they are."""
    if isinstance(samples, Missing):
        return samples
    return read_or_missing("what the samplers counted", lambda: find_events(samples, nodes, count))


def resource_use(samples: Sequence[Sampled], work: SampledWork) -> ResourceUse | Missing:
    """Use of resources in the steps of ``work``."""
    return read_or_missing("the samples", lambda: summarize(samples, work))


def _loss(steps: Sequence[Step]) -> Loss | None:
    first, last = (steps[0].loss, steps[-1].loss) if steps else (None, None)
    return None if first is None or last is None else Loss(first=first, last=last)


def _status(evidence: RunEvidence) -> tuple[Status, str | None]:
    progress = f"{len(evidence.steps)} of {evidence.plan.steps} steps"
    if evidence.interrupted:
        return "failed", f"interrupted by {evidence.interrupted} after {progress}"
    spoiled = next((step for step in evidence.steps if not step.finite), None)
    if spoiled:
        return "invalid", spoiled.values_text()
    if evidence.exit_code:
        why = first_failure(evidence.log_tail) or f"the workers ended with exit code {evidence.exit_code}"
        return "failed", f"{why}, after {progress}"
    if len(evidence.steps) != evidence.plan.steps:
        return "failed", f"the workers ended after {progress}"
    return ("invalid", evidence.contradiction) if evidence.contradiction else ("success", None)


def statistics_of_window(plan: Plan, inside: Sequence[Step], no_window: str | None = None) -> Statistics | Missing:
    """Statistics of the steps ``inside`` of the plan's window, without profiled ones, for a run that was successful.

    ``no_window``: why they cannot be combined.
    """
    size = plan.window.size
    if len(inside) < size:
        return Missing(f"only {len(inside)} of the {size} steps of the window were completed")
    profiled = sum(step.profiled for step in inside)
    if profiled / size > MOST_PROFILED:
        what = "traced" if plan.nccl_trace else "profiled"
        return Missing(f"{profiled} of the {size} steps of the window were {what}, which slows them down")
    if no_window:
        return Missing(no_window)
    return describe([step.step_time_s for step in inside if not step.profiled])


def _expert_load(plan: EnginePlan, steps: Sequence[Step]) -> ExpertLoadReport | None:
    loads = [step.expert_load for step in steps if step.expert_load]
    if not loads:
        return None
    return ExpertLoadReport(
        max_over_mean=fmean(load.max_over_mean for load in loads),
        idle_experts=fmean(load.idle_experts for load in loads),
        forced=plan.force_load_balancing,
        capacity_factor=plan.capacity_factor,
        dropped_pct=100 * fmean(load.dropped_share for load in loads),
    )


def _fp8(evidence: RunEvidence, steps: Sequence[Step]) -> Fp8Report | None:
    plan, environment = evidence.plan, evidence.environment
    counts = [step.fp8 for step in steps if step.fp8]
    if not counts or plan.fp8_recipe is None:
        return None
    return Fp8Report(
        recipe=plan.fp8_recipe,
        emulated=plan.emulate_fp8,
        saturated_tensors=fmean(count.saturated_tensors for count in counts),
        not_finite_tensors=fmean(count.not_finite_tensors for count in counts),
        product=environment.fp8_product if environment else None,
    )


def _used(
    evidence: RunEvidence, inside: Sequence[Step], statistics: Statistics | Missing
) -> tuple[ResourceUse | Missing, OtherWork | Missing]:
    """Use of resources, and other work, in the steps that ``statistics`` are of."""
    samples = evidence.samples
    if isinstance(samples, Missing):
        return samples, samples
    if isinstance(statistics, Missing):
        return statistics, statistics
    plan, environment = evidence.plan, evidence.environment
    spans = tuple(TimeSpan(step.ended_s - step.step_time_s, step.ended_s) for step in inside)
    gpus = _gpus(environment.gpus) if environment and environment.gpus else None
    work = SampledWork(
        spans=spans,
        tokens=len(spans) * plan.recipe.layout.gbs * plan.recipe.layout.seq_len,
        device=plan.device,
        nodes=environment.nodes if environment else (),
        gpus=gpus,
    )
    beside = read_or_missing("the samples", lambda: find_other_work(samples, spans, plan.device, gpus))
    return resource_use(samples, work), beside


def _gpus(states: Iterable[GpuState]) -> dict[str, set[str]] | None:
    """The GPUs that train, by node; None if an id is unknown."""
    gpus: dict[str, set[str]] = {}
    for gpu in states:
        if gpu.uuid is None:
            return None
        gpus.setdefault(gpu.node, set()).add(gpu.uuid)
    return gpus

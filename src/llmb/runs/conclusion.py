# SPDX-License-Identifier: Apache-2.0
"""Determines the result of a run from the files that it left: status, contradictions, window and measurements."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise, starmap
from statistics import fmean
from typing import Any

from llmb.base.missing import Missing
from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics, describe
from llmb.catalogue.records import Packing, Window
from llmb.catalogue.throughput import MOST_MFU_PCT, parameter_count, throughput, trainable_parameters, why_too_fast
from llmb.catalogue.window import STEADY
from llmb.readers.anomalies import NO_STEADY_STATE, steady_window
from llmb.readers.contradictions import CLOCK_ERROR_S, LONGEST_STEP_S, SHORTEST_STEP_S, Lap, clock_contradiction
from llmb.readers.logs.error_text import fault_at_end
from llmb.readers.samples.machine import MachineReport, find_events
from llmb.readers.samples.other_work import find_other_work
from llmb.readers.samples.sample_records import OtherWork, ResourceUse
from llmb.readers.samples.samples import GIB, Sampled, SampledWork, TimeSpan, summarize
from llmb.runs.checkpoint_use import CheckpointReport
from llmb.runs.environment import DeviceMemory, Environment, GpuState
from llmb.runs.failure import first_failure
from llmb.runs.folder import read_or_missing
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord
from llmb.runs.result import (
    NO_EXPERTS,
    NO_SAMPLES,
    NOT_SAMPLED,
    NOT_SUCCESSFUL,
    ExpertLoadReport,
    Fp8Report,
    LayerLoad,
    Loss,
    Parameters,
    PretendedRank,
    Result,
    Status,
    without_figures,
)
from llmb.runs.steps import Step, count_steps
from llmb.runs.trace_reports import ProfileReport

NO_FIGURES = ("checkpoint", "profile", "counters", "attention_backend", "network", "machine")
"""The fields, besides ``steps``, that an impossibly fast, and therefore invalid, result keeps."""
NOT_OF_ONE_RANK = ("loss", "peak_memory_gib", "tokens_per_s", "tflops_per_gpu", "mfu_pct", "days_per_1t_tokens")
"""Fields of a result that a pretended rank cannot have."""
MOST_PROFILED = 0.5
"""Maximum fraction of the window's steps that may be profiled or traced."""
WHOLE_SECONDS_S = 2 * CLOCK_ERROR_S
"""Maximum error of the difference between two times in the record, which are whole seconds."""


def figures_of(plan: Plan, step_time_s: float, packing: Packing | None = None) -> dict[str, Any]:
    """Return throughput, packing and parameter counts as fields of a result; ``packing`` defaults to the recipe's."""
    model, measured = plan.recipe.model, throughput(plan.recipe, step_time_s, lora=plan.lora, packing=packing)
    total, active = parameter_count(model)
    return {
        **asdict(measured),
        "packing": packing or plan.recipe.packing,
        "parameters": Parameters(total=total, active=active, trainable=trainable_parameters(model, plan.lora)),
    }


def measured_packing(plan: Plan, steps: Sequence[Step]) -> Packing | None:
    """Return the mean statistics of the sequences of ``steps``; None without steps, or if a step lacks them."""
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
    """Return why statistics of the window do not measure the run's speed, else None; ``began`` is the attempt's first
    step.
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
    """All evidence for the result of a run by llmb's engine."""

    plan: EnginePlan
    """The plan, whose window is that of the statistics, even if its rule is ``auto``."""
    steps: Sequence[Step]
    exit_code: int = 0
    log_tail: str = ""
    interrupted: str | None = None
    """The outside event that ended the run, if any."""
    checkpoint: CheckpointReport | Missing | None = None
    profile: ProfileReport | None = None
    no_window: str | None = None
    """The reason why statistics cannot combine the window's steps; None if they can."""
    began: int | None = None
    """The first step of the attempt that trained the window; None for the first step of the run."""
    contradiction: str | None = None
    """The contradiction in the record of a run that completed its steps, if any."""
    environment: Environment | None = None
    samples: Sequence[Sampled] | Missing = NOT_SAMPLED
    """The samples of the run's nodes, perhaps none; Missing if they were not taken or cannot be read."""


def if_possible(result: Result) -> Result:
    """Return ``result`` or, if its FLOP rate exceeds the GPUs' peak, an invalid result that keeps ``NO_FIGURES``."""
    why = why_too_fast(result.tflops_per_gpu or {}, result.peak_tflops)
    if why is None:
        return result
    values = {name: getattr(result, name) for name in NO_FIGURES}
    return without_figures("invalid", why, result.steps).model_copy(update=values)


def conclude(evidence: RunEvidence) -> Result:
    """Return the result of a run, without its verdict."""
    result = if_possible(_conclude(evidence))
    return result if evidence.plan.recipe.pretended_rank is None else _pretended(evidence.plan, result)


def _pretended(plan: Plan, result: Result) -> Result:
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
        error_at_end=result.error_at_end,
        reasons=dict.fromkeys(NOT_OF_ONE_RANK, why.reason),
        expert_load=why if plan.recipe.model.moe else NO_EXPERTS,
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
        device_memory=_device_memory(evidence),
        window=window if statistics and window.rule == STEADY else None,
        measurement_reason=no_measurement(plan, evidence.began) if statistics else None,
        checkpoint=evidence.checkpoint,
        profile=evidence.profile,
        expert_load=_expert_load(plan, inside) if statistics else statistics,
        counters=count_steps(steps),
        attention_backend=attention.backend if attention else None,
        untried=evidence.environment and evidence.environment.untried,
        error_at_end=(fault_at_end(evidence.log_tail.encode()) or None) if success else None,
        fp8=_fp8(evidence, inside) if statistics else None,
        resources=resources,
        other_work=other_work,
        machine=machine_report(samples, nodes) if samples or isinstance(samples, Missing) else NO_SAMPLES,
        **(figures_of(plan, statistics.mean, measured_packing(plan, inside)) if statistics else {}),
    )


def _device_memory(evidence: RunEvidence) -> DeviceMemory | Missing:
    environment = evidence.environment
    if environment and environment.cuda is None:
        return Missing("the run used no GPU")
    return (environment and environment.device_memory) or Missing("the free memory of GPUs was not recorded")


def machine_report(
    samples: Sequence[Sampled] | Missing, nodes: Sequence[str] = (), count: int | None = None
) -> MachineReport | Missing:
    """Report the rises of counters and the kernel messages on a run's nodes; Missing if the samples are unusable."""
    if isinstance(samples, Missing):
        return samples
    return read_or_missing("what the samplers counted", lambda: find_events(samples, nodes, count))


def resource_use(samples: Sequence[Sampled], work: SampledWork) -> ResourceUse | Missing:
    """Summarize the use of resources in the steps of ``work``; Missing if the samples are unusable."""
    return read_or_missing("the samples", lambda: summarize(samples, work))


def _loss(steps: Sequence[Step]) -> Loss | None:
    first, last = (steps[0].loss, steps[-1].loss) if steps else (None, None)
    return None if first is None or last is None else Loss(first=first, last=last)


def _status(evidence: RunEvidence) -> tuple[Status, str | None]:
    progress = f"{len(evidence.steps)} of {evidence.plan.steps} steps"
    if evidence.interrupted:
        return "failed", f"interrupted by {evidence.interrupted} after {progress}"
    if spoiled := next((step for step in evidence.steps if not step.finite), None):
        return "invalid", spoiled.values_text()
    if evidence.exit_code:
        why = first_failure(evidence.log_tail) or f"the workers ended with exit code {evidence.exit_code}"
        return "failed", f"{why}, after {progress}"
    if len(evidence.steps) != evidence.plan.steps:
        return "failed", f"the workers ended after {progress}"
    return ("invalid", evidence.contradiction) if evidence.contradiction else ("success", None)


def statistics_of_window(plan: Plan, inside: Sequence[Step], no_window: str | None = None) -> Statistics | Missing:
    """Return statistics of the window's steps, without profiled ones; Missing for ``no_window``, or if steps are
    missing or mostly profiled.
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


def _expert_load(plan: EnginePlan, steps: Sequence[Step]) -> ExpertLoadReport | Missing:
    loads, model = [step.expert_load for step in steps if step.expert_load], plan.recipe.model
    if model.moe is None:
        return NO_EXPERTS
    if not loads:
        return Missing("the steps of the window do not record the load of experts")
    numbers = [layer for layer in range(model.layers) if model.is_moe_layer(layer)]
    # Steps that an older version recorded have no layers.
    detailed = [load for load in loads if load.layers_max_over_mean] or loads
    experts = [fmean(layer) for layer in zip(*(load.layers_max_over_mean for load in detailed), strict=False)]
    ranks = [fmean(layer) for layer in zip(*(load.layers_rank_max_over_mean for load in detailed), strict=False)]
    return ExpertLoadReport(
        rank_max_over_mean=fmean(ranks) if ranks else None,
        layers=tuple(starmap(LayerLoad, zip(numbers, experts, ranks, strict=False))),
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
    plan, environment, samples = evidence.plan, evidence.environment, evidence.samples
    if isinstance(samples, Missing):
        return samples, samples
    if isinstance(statistics, Missing):
        return statistics, statistics
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
    gpus: dict[str, set[str]] = {}
    for gpu in states:
        if gpu.uuid is None:
            return None
        gpus.setdefault(gpu.node, set()).add(gpu.uuid)
    return gpus


def why_contradicting(
    record: RunRecord, steps: Sequence[Step], *, log_gpus: int | None = None, log_gbs: int | None = None
) -> str | None:
    """Describe how the record of a completed run contradicts itself, its ``steps`` or its log; None if it does not."""
    texts = (
        *[step.values_text() for step in steps if not step.finite][:1],
        *_wrong_steps(record.plan, steps),
        *_other_sizes(record, steps, log_gpus, log_gbs),
        *_longer_than_the_run(record, steps),
        *_other_result(record, steps),
    )
    return "the record contradicts itself: " + "; ".join(texts) if texts else None


def _wrong_steps(plan: Plan, steps: Sequence[Step]) -> Iterator[str]:
    first, last = plan.window.first, plan.window.last
    if not plan.first_step <= first <= last <= plan.last_step:
        yield f"the window is steps {first}-{last}, but the run has steps {plan.first_step}-{plan.last_step}"
    numbers, run = [step.step for step in steps], range(plan.first_step, plan.last_step + 1)
    if beyond := [number for number in numbers if number not in run]:
        yield f"step {beyond[0]} is recorded, but the run has steps {plan.first_step}-{plan.last_step}"
    elif steps:
        yield from _wrong_order((plan.first_step - 1, *numbers, plan.last_step + 1))
    if bad := next((step for step in steps if not SHORTEST_STEP_S < step.step_time_s < LONGEST_STEP_S), None):
        yield f"step {bad.step} took {bad.step_time_s:.4g} s, which is impossible"
    inside = [step for step in steps if step.step in plan.window]
    if skipped := sum(not step.updated for step in inside):
        yield f"{counted(skipped, 'step')} of the window skipped the update of the parameters"
    if other := next((step for step in steps if step.profiled != plan.slows_down(step.step)), None):
        yield f"step {other.step} was {'' if other.profiled else 'not '}profiled, contrary to the plan"
    laps = [
        Lap(
            steps_s=step.step_time_s,
            clock_s=step.ended_s - before.ended_s,
            between_s=step.pause_s,
            ranks_apart_s=_ranks_apart_s(step),
        )
        for before, step in pairwise(inside)
    ]
    if contradiction := clock_contradiction(laps):
        yield contradiction


def _wrong_order(numbers: Sequence[int]) -> Iterator[str]:
    for before, number in pairwise(numbers):
        if number != before + 1:
            repeated = "was written twice" if number == before else f"is written after step {before}"
            yield f"step {number} {repeated}" if number <= before else f"step {before + 1} is missing"
            return


def _ranks_apart_s(step: Step) -> float:
    return step.rank_step_time_s_max - step.rank_step_time_s_min


def _other_sizes(record: RunRecord, steps: Sequence[Step], log_gpus: int | None, log_gbs: int | None) -> Iterator[str]:
    recipe, layout = record.plan.recipe, record.plan.recipe.layout
    is_alone = recipe.pretended_rank is not None
    workers = sum(record.environment.ranks_per_node.values()) if record.environment else None
    gpus = {"layout": record.plan.processes, "environment": workers, "log": log_gpus}
    batches = {"layout": layout.gbs, "log": None if is_alone else log_gbs}
    for what, sources in (("number of GPUs", gpus), ("global batch size", batches)):
        counts = {who: count for who, count in sources.items() if count}
        if len(set(counts.values())) > 1:
            yield f"the {what} is " + ", ".join(f"{count} in the {who}" for who, count in counts.items())
    tokens = layout.gbs * layout.seq_len // (layout.dp if is_alone else 1)
    if bad := next((step for step in steps if step.padded_tokens != tokens), None):
        yield f"step {bad.step} has {bad.padded_tokens:,} tokens, but the layout has {tokens:,}"


def _longer_than_the_run(record: RunRecord, steps: Sequence[Step]) -> tuple[str, ...]:
    last = record.attempts[-1] if record.attempts else None
    began, ended = last.started_at if last else record.started_at, record.ended_at
    if not began or not ended:
        return ()
    lasted_s = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    trained = [step for step in steps if not last or step.step >= last.first_step]
    trained_s, apart_s = sum(step.step_time_s for step in trained), sum(map(_ranks_apart_s, trained))
    if lasted_s < -WHOLE_SECONDS_S:
        return (f"the run ended {-lasted_s:.4g} s before it began",)
    if trained_s <= lasted_s + WHOLE_SECONDS_S + apart_s:
        return ()
    return (f"the steps took {trained_s:.4g} s in all, but the run lasted {lasted_s:.4g} s",)


def _other_result(record: RunRecord, steps: Sequence[Step]) -> Iterator[str]:
    result, window = record.result, record.window
    if record.status in ("queued", "running"):
        return
    if result is None or result.status != record.status:
        yield f"its status is {record.status}, but {f'its result is {result.status}' if result else 'it has no result'}"
    if steps and record.status == "success" and len(steps) != record.plan.steps:
        yield f"its status is success, but {len(steps)} of {record.plan.steps} steps are recorded"
    if result and (why := why_too_fast(result.tflops_per_gpu or {}, result.peak_tflops)):
        yield why
    if result and (beyond := max((mfu for mfu in (result.mfu_pct or {}).values() if mfu), default=0)) > MOST_MFU_PCT:
        yield f"its result has an MFU of {beyond:.4g} %"
    times = [step.step_time_s for step in steps if step.step in window and not step.profiled]
    mean_s = result.step_time_s.mean if result and result.step_time_s else None
    if mean_s is not None and times and not math.isclose(fmean(times), mean_s, rel_tol=1e-9):
        mean = f"the mean of steps {window.first}-{window.last}"
        yield f"{mean} is {fmean(times):.6g} s, but its result has {mean_s:.6g} s"
    tokens, rate = record.plan.recipe.layout.gbs * record.plan.recipe.layout.seq_len, result and result.tokens_per_s
    if mean_s and rate and not math.isclose(rate * mean_s, tokens, rel_tol=0.01):
        yield f"its result has {rate:.6g} tokens/s, but {tokens / mean_s:.6g} according to its step time"


def with_steady_window(record: RunRecord, steps: Sequence[Step]) -> tuple[RunRecord, str | None]:
    """Return the record, with its steady window if the rule is ``auto``, and a reason if there is none."""
    plan = record.plan
    if plan.window.rule != STEADY:
        return record, None
    steady = _steady(max(_attempts(record, steps), key=len)[1:])  # the first step of an attempt includes warm-up
    if steady is None:
        return record, NO_STEADY_STATE
    return record.model_copy(update={"plan": plan.model_copy(update={"window": steady})}), None


def _attempts(record: RunRecord, steps: Sequence[Step]) -> list[list[Step]]:
    rest = [step for step in steps if not step.profiled]
    parts = []
    for attempt in reversed(record.attempts):
        parts.append([step for step in rest if step.step >= attempt.first_step])
        rest = [step for step in rest if step.step < attempt.first_step]
    return [*parts, rest]


def _steady(steps: Sequence[Step]) -> Window | None:
    steady = steady_window([step.step_time_s for step in steps], 0)
    if steady is None:
        return None
    return Window(first=steps[steady.first].step, last=steps[steady.last].step, rule=STEADY)


def split_window_reason(record: RunRecord) -> str | None:
    """Describe which attempt began inside the window; None if all steps of the window are of one attempt."""
    window = record.plan.window
    for attempt in record.attempts[1:]:
        if window.first < attempt.first_step <= window.last:
            steps = f"{window.first}-{window.last}"
            return f"attempt {attempt.number} began at step {attempt.first_step}, in the window {steps}"
    return None


def window_began(record: RunRecord) -> int:
    """Return the first step of the attempt that trained the first step of the window."""
    first = record.plan.window.first
    begun = (attempt.first_step for attempt in reversed(record.attempts))
    return next((step for step in begun if step <= first), record.plan.first_step)

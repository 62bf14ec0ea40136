# SPDX-License-Identifier: Apache-2.0
"""What a run of the engine leaves behind, and the result that follows from it. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from llmb.metrics.statistics import describe
from llmb.metrics.window import STEADY
from llmb.resources.other_work import find_other_work
from llmb.resources.read import Sampled
from llmb.resources.records import OtherWork, ResourceUse
from llmb.resources.series import TimeSpan
from llmb.resources.summary import SampledWork, summarize
from llmb.runs.checkpoint_report import CheckpointReport
from llmb.runs.environment import Environment, GpuState
from llmb.runs.failure import first_failure
from llmb.runs.plan import EnginePlan
from llmb.runs.profile_report import ProfileReport
from llmb.runs.result import (
    NOT_SUCCESSFUL,
    ExpertLoadReport,
    Fp8Report,
    Loss,
    Result,
    Status,
    figures_of,
    measured_packing,
    no_measurement,
)
from llmb.runs.steps import Step, count_steps

GIB = 2**30
MOST_PROFILED = 0.5
"""Maximum fraction of the window's steps that may be profiled and thus excluded for valid statistics."""


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """All that the result of a run is concluded from."""

    plan: EnginePlan
    """Its window is that of the statistics, also if its rule is ``auto``."""
    steps: Sequence[Step]
    exit_code: int = 0
    log_tail: str = ""
    interrupted: str | None = None
    """What ended the run from outside."""
    checkpoint: CheckpointReport | None = None
    profile: ProfileReport | None = None
    no_window: str | None = None
    """Why the steps of the window cannot be combined."""
    began: int | None = None
    """The first step of the attempt that trained the window, if not that of the run."""
    contradiction: str | None = None
    """Why the record of a run that did all its steps cannot be true."""
    environment: Environment | None = None
    samples: Sequence[Sampled] | str = "the run was not sampled"
    """Samples of the resources in use; the reason if there are none."""


def conclude(evidence: RunEvidence) -> Result:
    """The result of a run, but for its verdict."""
    plan, steps, window = evidence.plan, evidence.steps, evidence.plan.window
    status, reason = _status(evidence)
    inside = [step for step in steps if window.first <= step.step <= window.last]
    no_statistics = _no_statistics(plan, status, inside) or evidence.no_window
    inside = [step for step in inside if not step.profiled]
    statistics = None if no_statistics else describe([step.step_time_s for step in inside])
    attention = evidence.environment and evidence.environment.attention
    return Result(
        status=status,
        reason=reason,
        steps=len(steps),
        step_time_s=statistics,
        loss=Loss(first=steps[0].loss, last=steps[-1].loss) if steps and status != "invalid" else None,
        peak_memory_gib=max(step.peak_memory_bytes for step in steps) / GIB if steps else None,
        step_time_reason=no_statistics,
        window=window if statistics and window.rule == STEADY else None,
        measurement_reason=no_measurement(plan, evidence.began) if statistics else None,
        checkpoint=evidence.checkpoint,
        profile=evidence.profile,
        expert_load=None if no_statistics else _expert_load(plan, inside),
        counters=count_steps(steps),
        attention_backend=attention.backend if attention else None,
        fp8=None if no_statistics else _fp8(evidence, inside),
        **(figures_of(plan, statistics.mean, measured_packing(plan, inside)) if statistics else {}),
        **_resources(evidence, inside, no_statistics),
    )


def _status(evidence: RunEvidence) -> tuple[Status, str | None]:
    done = f"{len(evidence.steps)} of {evidence.plan.steps} steps"
    if evidence.interrupted:
        return "failed", f"interrupted by {evidence.interrupted} after {done}"
    spoiled = next((step for step in evidence.steps if not step.finite), None)
    if spoiled:
        return "invalid", spoiled.values_text()
    if evidence.exit_code:
        why = first_failure(evidence.log_tail) or f"the workers ended with exit code {evidence.exit_code}"
        return "failed", f"{why}, after {done}"
    if len(evidence.steps) != evidence.plan.steps:
        return "failed", f"the workers ended after {done}"
    return ("invalid", evidence.contradiction) if evidence.contradiction else ("success", None)


def _no_statistics(plan: EnginePlan, status: Status, inside: Sequence[Step]) -> str | None:
    """The reason if the steps of the window give no statistics, else None."""
    window = plan.window
    size = window.last - window.first + 1
    if status != "success":
        return NOT_SUCCESSFUL
    if len(inside) < size:
        return f"only {len(inside)} of the {size} steps of the window were completed"
    profiled = sum(step.profiled for step in inside)
    if profiled / size > MOST_PROFILED:
        what = "traced" if plan.nccl_trace else "profiled"
        return f"{profiled} of the {size} steps of the window were {what}, which slows them down"
    return None


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


def _resources(evidence: RunEvidence, inside: Sequence[Step], no_statistics: str | None) -> dict[str, Any]:
    """Use of resources and other work in the steps that the statistics are of, as fields of a result."""
    use: ResourceUse | str
    others: OtherWork | str
    if isinstance(evidence.samples, str) or no_statistics:
        use = others = evidence.samples if isinstance(evidence.samples, str) else str(no_statistics)
    else:
        use, others = _sampled(evidence, evidence.samples, inside)
    return {
        "resources": None if isinstance(use, str) else use,
        "resources_reason": use if isinstance(use, str) else None,
        "other_work": None if isinstance(others, str) else others,
        "other_work_reason": others if isinstance(others, str) else None,
    }


def _sampled(
    evidence: RunEvidence, samples: Sequence[Sampled], inside: Sequence[Step]
) -> tuple[ResourceUse | str, OtherWork | str]:
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
    return summarize(samples, work), find_other_work(samples, spans, plan.device, gpus)


def _gpus(states: Iterable[GpuState]) -> dict[str, set[str]] | None:
    """The GPUs that train, by node; None if an id is unknown."""
    gpus: dict[str, set[str]] = {}
    for gpu in states:
        if gpu.uuid is None:
            return None
        gpus.setdefault(gpu.node, set()).add(gpu.uuid)
    return gpus

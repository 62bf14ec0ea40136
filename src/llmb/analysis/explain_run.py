# SPDX-License-Identifier: Apache-2.0
"""Gathers what is known of a run from its files, and explains why it is slow."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.judge_run import Judged
from llmb.catalogue.records import Recipe, Window
from llmb.resources.records import GpuUse
from llmb.runs.conditions import known_differences
from llmb.runs.environment import Environment, GpuState
from llmb.runs.folder import RunFolder
from llmb.runs.identity import Difference, Value, differences
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import Result
from llmb.runs.steps import Step, read_steps
from llmb.runs.trace_reports import kept_breakdown
from llmb.schedulers.lookup import LOCAL
from llmb.traces.breakdown import StepBreakdown
from llmb.verdict.causes import Explanation, explain_evidence
from llmb.verdict.causes_evidence import Differing, Evidence, ReferenceTime, Throttle, Work
from llmb.verdict.conditions import Verdict, rule_of

CONDITIONS = ("software.", "hardware.", "variables.", "nodes", "node_count", "fabric", "release")
"""What of a run's conditions may change the time of a step; keys that begin with these."""
US = 1_000_000


def explain_judged(judged: Judged) -> Explanation | None:
    """Explains of several repeats the one with the median step time, against that of the baseline's runs."""
    run, baseline = _typical(judged.runs), _typical(judged.baseline)
    return explain(run, baseline, judged.verdict) if run else None


def _typical(runs: Sequence[AnalyzedRun]) -> AnalyzedRun | None:
    timed = sorted((run.step_time_s.mean, number) for number, run in enumerate(runs) if run.step_time_s)
    return runs[timed[(len(timed) - 1) // 2][1]] if timed else None


def explain(run: AnalyzedRun, against: AnalyzedRun | None = None, verdict: Verdict | None = None) -> Explanation | None:
    """Why ``run`` is slow, compared with a baseline, else with the reference of its verdict, if there is one.

    None for a run without a step time.
    """
    if run.step_time_s is None:
        return None
    steps = _steps_of(run)
    found = verdict or (run.record.result.verdict or None if run.record and run.record.result else None)
    reference = _baseline(run, against, steps) if against else _of_verdict(found, run, steps)
    explained = explain_evidence(_evidence(run, run.step_time_s.mean, steps), reference, _words(run))
    predicted = run.record.plan.predicted if run.record else None
    return explained.model_copy(update={"predicted_s": predicted and predicted.breakdown_s})


def _evidence(run: AnalyzedRun, step_time_s: float, steps: Sequence[Step]) -> Evidence:
    if run.record is None:
        return Evidence(step_time_s=step_time_s, step_times_s=run.step_times_s, faults=run.faults)
    inside = [step for step in steps if run.window and step.step in run.window and not step.profiled]
    environment = run.record.environment
    return Evidence(
        step_time_s=step_time_s,
        step_times_s=run.step_times_s,
        steps=inside,
        work=work_of(run.record.plan),
        trace=_trace(RunFolder(run.path)),
        node_of=node_of_ranks(environment) if environment else {},
        throttled=_throttled(environment, run.record.result) if environment else None,
        faults=run.faults,
        trained_s=sum(step.step_time_s + (step.pause_s or 0.0) for step in steps) or None,
    )


def _steps_of(run: AnalyzedRun) -> list[Step]:
    """All of the run; empty if only its log has them. Raises BrokenRecord or OSError if they cannot be read."""
    return read_steps(RunFolder(run.path).steps) if run.record else []


def _trace(folder: RunFolder) -> StepBreakdown | None:
    """None also if it is damaged: 'llmb result' says so."""
    try:
        return kept_breakdown(folder)
    except (OSError, BrokenRecord):
        return None


def work_of(plan: Plan) -> Work:
    layout, model = plan.recipe.layout, plan.recipe.model
    return Work(
        ranks=layout.gpus,
        on_gpu=plan.device == "cuda",
        layer_passes=layout.layers / layout.pp * layout.ga,
        comparable_layers=layout.pp == 1 or model.moe is None,
        shared_by=layout.tp * layout.cp * (layout.ep if model.moe else 1),
        recompute=plan.recompute if isinstance(plan, EnginePlan) else None,
        saves=plan.checkpoint_interval is not None,
    )


def node_of_ranks(environment: Environment) -> dict[int, str]:
    """The node of each rank: ranks are numbered node by node."""
    each = [node for node in environment.nodes for _ in range(environment.ranks_per_node.get(node, 0))]
    return dict(enumerate(each))


def _throttled(environment: Environment, result: Result | None) -> tuple[Throttle, ...] | None:
    """By the samples of the window, else by the counters of the driver, before the first step and after the last; None
    where no GPU tells.
    """
    gpus = (result.resources.gpus if result and result.resources else None) or ()
    sampled = [gpu for gpu in gpus if gpu.throttled is not None]
    if sampled:
        most = {gpu.uuid: gpu.max_sm_clock_mhz for gpu in environment.gpus or ()}
        return tuple(item for gpu in sampled for item in _sampled_throttles(gpu, most.get(gpu.uuid)))
    before = {(gpu.node, gpu.index): gpu for gpu in environment.gpus or ()}
    after = [gpu for gpu in environment.gpus_at_end or () if gpu.throttle_reasons is not None or gpu.throttled_us]
    if not after:
        return None
    return tuple(item for gpu in after for item in _throttles(before.get((gpu.node, gpu.index)), gpu))


def _throttles(before: GpuState | None, after: GpuState) -> Iterator[Throttle]:
    name = f"GPU {after.index} of {after.node}"
    if before and before.throttled_us is not None and after.throttled_us is not None:
        for reason, us in after.throttled_us.items():
            if us > before.throttled_us.get(reason, 0.0):
                yield Throttle(name, reason, (us - before.throttled_us.get(reason, 0.0)) / US)
    else:
        yield from (Throttle(name, reason, None) for reason in after.throttle_reasons or ())


def _sampled_throttles(gpu: GpuUse, max_clock_mhz: float | None) -> Iterator[Throttle]:
    clocks = (gpu.sm_clock_mhz_mean, max_clock_mhz) if gpu.sm_clock_mhz_mean and max_clock_mhz else (None, None)
    for reason, share in (gpu.throttled or {}).items():
        yield Throttle(f"GPU {gpu.index} of {gpu.node}", reason, None, share, *clocks)


def _baseline(run: AnalyzedRun, against: AnalyzedRun, steps: Sequence[Step]) -> ReferenceTime | None:
    """Scaled to as many sequences per GPU as the run has. None if the baseline has no step time."""
    if against.step_time_s is None:
        return None
    own, other = _sequences(run.recipe), _sequences(against.recipe)
    scale = own / other if own and other else 1.0
    found = (
        *differences(against.identity.configuration, run.identity.configuration),
        *known_differences(_kept(against.conditions), _kept(run.conditions)),
    )
    window = against.window if against.window != run.window else None
    return ReferenceTime(
        step_time_s=against.step_time_s.mean * scale,
        source=f"run {against.id}" + (f", for {own:g} sequences per GPU" if scale != 1 else ""),
        differing=tuple(map(_as_text, found)),
        evidence=_evidence(against, against.step_time_s.mean, _steps_of(against)),
        window_mean_s=_mean_in(window, steps),
        window_text=_window_text(window),
    )


def _sequences(recipe: Recipe | None) -> float | None:
    return recipe.layout.gbs / recipe.layout.gpus if recipe else None


def _kept(conditions: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in conditions.items() if key.startswith(CONDITIONS) or rule_of(key).important}


def _as_text(item: Difference) -> Differing:
    own, reference = (None if value is None else str(value) for value in (item.after, item.before))
    return Differing(item.key, own, reference)


def _of_verdict(verdict: Verdict | None, run: AnalyzedRun, steps: Sequence[Step]) -> ReferenceTime | None:
    if verdict is None or verdict.reference is None:
        return None
    reference = verdict.reference
    window = reference.window if reference.window != run.window else None
    return ReferenceTime(
        step_time_s=reference.step_time_s,
        source=reference.source,
        differing=tuple(Differing(item.key, item.own, item.reference, item.slower_pct) for item in verdict.conditions),
        window_mean_s=_mean_in(window, steps),
        window_text=reference.window_text or _window_text(window),
    )


def _mean_in(window: Window | None, steps: Sequence[Step]) -> float | None:
    """Mean of the run's own steps in the window of its reference; None if it has not all of them."""
    if window is None:
        return None
    inside = [step.step_time_s for step in steps if step.step in window and not step.profiled]
    return fmean(inside) if len(inside) == window.size else None


def _window_text(window: Window | None) -> str:
    return f"steps {window.first} to {window.last}" if window else ""


def _words(run: AnalyzedRun) -> dict[str, str]:
    """What stands in the commands that confirm a cause. A run without a record has no recipe."""
    recipe = run.recipe
    if recipe is None:
        unknown = {"workload": "WORKLOAD", "size": "SIZE", "gpu_type": "TYPE", "last_rank": "N"}
        return {"run": str(run.path), "command": "llmb run -w WORKLOAD -s SIZE", **unknown}
    job = run.record.job if run.record else None
    starts = "submit" if job and job.scheduler != LOCAL else "run"
    options = f"-w {recipe.workload} -s {recipe.size} --dtype {recipe.dtype.value} --gpu-type {recipe.gpu_type}"
    return {
        "run": str(run.path),
        "command": f"llmb {starts} {options} --scale {recipe.scale}",
        "workload": recipe.workload,
        "size": recipe.size,
        "gpu_type": recipe.gpu_type,
        "last_rank": str(recipe.layout.gpus - 1),
    }

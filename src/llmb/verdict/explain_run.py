# SPDX-License-Identifier: Apache-2.0
"""Gathers the evidence in a run's files, and explains why the run is slow."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from llmb.base.missing import Missing
from llmb.catalogue.records import Dtype, Recipe, Record, Window
from llmb.catalogue.throughput import FROZEN_PASSES, PASSES, routed_share
from llmb.readers.profiles.breakdown import StepBreakdown
from llmb.readers.samples.sample_records import GpuUse
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.conditions import Difference, Value, definite_differences, differences, rule_of
from llmb.runs.environment import Environment, GpuState
from llmb.runs.experiment import ENGINE
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.rank_times import read_excess
from llmb.runs.record import LOCAL
from llmb.runs.result import Condition, Reference, Result, Verdict
from llmb.runs.steps import Step, read_steps
from llmb.runs.trace_reports import read_breakdown
from llmb.verdict.causes import (
    FINDERS,
    Bound,
    CauseName,
    CauseRule,
    CauseShare,
    Evidence,
    ExpertWork,
    ReferenceEvidence,
    Throttle,
    Work,
    cause_rules,
)
from llmb.verdict.judge_run import Judged

MOST_SHOWN = 4
"""Maximum number of differences to list for one cause."""


class Cause(Record):
    """A cause and its cost."""

    name: CauseName
    title: str
    share_s: float | None
    """Seconds per step; None if unknown."""
    share_pct: float | None
    """Percentage of the step time."""
    bound: Bound
    in_step: bool
    """False if the cost is between steps, and not part of the step time."""
    evidence: tuple[str, ...]
    confirm: str
    """A command that confirms the cause, with advice."""


class UnknownCause(Record):
    """A possible cause that the run's data neither show nor exclude."""

    name: CauseName
    title: str
    reason: str
    confirm: str
    """A command that shows or excludes the cause, with advice."""


class Explanation(Record):
    """The causes of a run's step time: possible causes of others first, the rest by share, unknown ones last."""

    run: str
    """The run's folder, or its log."""
    step_time_s: float
    reference_s: float | None
    """The step time of the reference, scaled as in ``ReferenceEvidence``; None if there is no reference."""
    reference: str | None
    gap_s: float | None
    """Seconds by which a step takes longer than the reference's; None if there is no reference."""
    unexplained_s: float | None
    """Seconds of ``gap_s`` without a cause; None without a reference, or below 1 % of a step (``least_share_pct``)."""
    causes: tuple[Cause, ...]
    not_known: tuple[UnknownCause, ...]
    predicted_s: dict[str, float] | None = None
    """The predicted seconds of each part of the step; None if the step was not predicted."""


Words = Mapping[str, str]
"""Values by placeholder for the commands that confirm causes: ``run``, ``command``, ..."""


def explain_evidence(run: Evidence, against: ReferenceEvidence | None, words: Words) -> Explanation:
    reference = against.reference if against else None
    measured = dict(_measured(run, against.evidence if against else None))
    found = {name: item for name, item in measured.items() if isinstance(item, CauseShare)}
    gap_s = run.mean_s - reference.step_time_s if reference else None
    rest_s = None
    least_s = run.mean_s * cause_rules().least_share_pct.value / 100
    if against and gap_s is not None:
        found |= _window(run, against)
        rest_s = gap_s - sum(item.share_s or 0.0 for item in found.values() if item.in_step)
        differing = _differing(against.differing, found, rest_s)
        found |= _suspected(differing) if gap_s >= least_s else differing
        if any(item.share_s for item in differing.values()):
            rest_s = min(rest_s, 0.0)
    causes = [
        _cause(name, item, run, words)
        for name, item in found.items()
        if item.share_s is None or item.share_s >= least_s
    ]
    return Explanation(
        run=words["run"],
        step_time_s=run.mean_s,
        reference_s=reference.step_time_s if reference else None,
        reference=reference.source if reference else None,
        gap_s=gap_s,
        unexplained_s=rest_s if rest_s is not None and rest_s >= least_s else None,
        causes=tuple(sorted(causes, key=_order)),
        not_known=tuple(
            UnknownCause(
                name=name,
                title=cause_rules().rule(name).title,
                reason=item.reason,
                confirm=_command(cause_rules().rule(name), words),
            )
            for name, item in measured.items()
            if isinstance(item, Missing)
        ),
    )


def _measured(run: Evidence, baseline: Evidence | None) -> Iterator[tuple[CauseName, CauseShare | Missing]]:
    for name, find in FINDERS.items():
        item = find(run)
        if item is None:
            continue
        if baseline is None or isinstance(item, Missing) or cause_rules().rule(name).first:
            yield name, item
            continue
        other = find(baseline)
        if item.share_s is None:
            if not isinstance(other, CauseShare):
                yield name, item
        elif name == "recomputation":
            if baseline.work != run.work:
                yield name, item
        elif isinstance(other, Missing):
            yield name, item
        else:
            yield name, _more(item, other)


def _more(item: CauseShare, other: CauseShare | None) -> CauseShare:
    if other is None or other.share_s is None or item.share_s is None:
        return item
    note = f"the baseline has {other.share_s:.3f} s of it, which is not counted"
    return replace(item, share_s=item.share_s - other.share_s, evidence=(*item.evidence, note))


def _window(run: Evidence, against: ReferenceEvidence) -> dict[CauseName, CauseShare]:
    if against.window_mean_s is None:
        return {}
    mean_s, window = against.window_mean_s, against.reference.window
    steps = against.reference.window_text or (f"steps {window.first} to {window.last}" if window else "")
    said = f"the reference averages {steps}; this run's mean over these is {mean_s:.4g} s"
    return {"window": CauseShare(share_s=run.mean_s - mean_s, evidence=(said,))}


def _differing(
    differing: tuple[Condition, ...], found: Mapping[CauseName, CauseShare], rest_s: float
) -> dict[CauseName, CauseShare]:
    rules = cause_rules()
    by_rule: dict[CauseName, list[Condition]] = {}
    for item in differing:
        rule = rules.rule_of_key(item.key)
        if rule and (rule.name not in found or rule.name == "recomputation"):
            by_rule.setdefault(rule.name, []).append(item)
    timed = [name for name in by_rule if rules.rule(name).times_steps]
    chosen = [name for name in timed if name not in ("machine", "software")]
    causes: dict[CauseName, CauseShare] = {}
    for name, items in by_rule.items():
        said = _said(items)
        measured = found.get(name)
        share_s = max(rest_s, 0.0) if name in (chosen or timed) else None
        if measured:  # the rest no longer includes its own share
            share_s, said = (share_s or 0.0) + (measured.share_s or 0.0), (*said, *measured.evidence)
        if share_s is None and name in timed:
            said = (*said, "listed because it differs; nothing shows that it costs time")
        bound: Bound = "about" if len(chosen or timed) == 1 else "at most"
        causes[name] = CauseShare(share_s=share_s, bound=bound, evidence=said)
    return causes


def _suspected(differing: Mapping[CauseName, CauseShare]) -> dict[CauseName, CauseShare]:
    return {
        name: replace(item, share_s=item.share_s or None) if cause_rules().rule(name).first else item
        for name, item in differing.items()
    }


def _said(items: Sequence[Condition]) -> tuple[str, ...]:
    shown = [
        f"{item.key}: {item.own or 'n/a'}, reference {item.reference or 'n/a'}{_worth(item)}"
        for item in items[:MOST_SHOWN]
    ]
    return (*shown, *([f"and {len(items) - MOST_SHOWN} more"] if len(items) > MOST_SHOWN else []))


def _worth(item: Condition) -> str:
    return f", worth {item.slower_pct[0]:g} to {item.slower_pct[1]:g} % of a step" if item.slower_pct else ""


def _cause(name: CauseName, item: CauseShare, run: Evidence, words: Words) -> Cause:
    rule = cause_rules().rule(name)
    return Cause(
        name=name,
        title=rule.title,
        share_s=item.share_s,
        share_pct=None if item.share_s is None else 100 * item.share_s / run.mean_s,
        bound=item.bound,
        in_step=item.in_step,
        evidence=item.evidence,
        confirm=_command(rule, words),
    )


def _command(rule: CauseRule, words: Words) -> str:
    return rule.confirm.format_map(words)


def _order(cause: Cause) -> tuple[bool, float, int]:
    names = [rule.name for rule in cause_rules().causes]
    first = cause_rules().rule(cause.name).first
    share_s = -1.0 if first or cause.share_s is None else cause.share_s
    return not first, -share_s, names.index(cause.name)


CONDITIONS = ("software.", "hardware.", "variables.", "nodes", "node_count", "fabric", "release")
"""Prefixes of the conditions that may change the time of a step."""
US = 1_000_000


def explain_judged(judged: Judged) -> Explanation | None:
    """Explain why the repeat with the median step time is slower than the reference; return None without step times."""
    run, baseline = _typical(judged.runs), _typical(judged.baseline)
    return explain(run, baseline, judged.verdict) if run else None


def _typical(runs: Sequence[AnalyzedRun]) -> AnalyzedRun | None:
    timed = sorted((run.step_time_s.mean, number) for number, run in enumerate(runs) if run.step_time_s)
    return runs[timed[(len(timed) - 1) // 2][1]] if timed else None


def explain(run: AnalyzedRun, against: AnalyzedRun | None = None, verdict: Verdict | None = None) -> Explanation | None:
    """Explain why ``run`` is slower than its reference; None without a step time.

    Raise BrokenRecord or OSError for unreadable steps.
    """
    if run.step_time_s is None:
        return None
    steps = _steps_of(run)
    found = verdict or (run.record.result.verdict or None if run.record and run.record.result else None)
    reference = _baseline(run, against, steps) if against else _of_verdict(found, run, steps)
    explained = explain_evidence(_evidence(run, steps), reference, _words(run))
    predicted = run.record.plan.predicted if run.record else None
    return explained.model_copy(update={"predicted_s": predicted and predicted.breakdown_s})


def _evidence(run: AnalyzedRun, steps: Sequence[Step]) -> Evidence:
    if run.record is None:
        return Evidence(run=run)
    inside = [step for step in steps if run.window and step.step in run.window and not step.profiled]
    environment = run.record.environment
    return Evidence(
        run=run,
        steps=inside,
        work=work_of(run.record.plan),
        ranks=read_excess(RunFolder(run.path).rank_times, run.record.plan.recipe, {step.step for step in inside}),
        trace=_trace(RunFolder(run.path)),
        node_of=node_of_ranks(environment) if environment else {},
        throttled=_throttled(environment, run.record.result) if environment else None,
        trained_s=sum(step.step_time_s + (step.pause_s or 0.0) for step in steps) or None,
    )


def _steps_of(run: AnalyzedRun) -> list[Step]:
    return read_steps(RunFolder(run.path).steps) if run.record else []


def _trace(folder: RunFolder) -> StepBreakdown | None:
    try:
        return read_breakdown(folder)
    except (OSError, BrokenRecord):
        return None


def work_of(plan: Plan) -> Work:
    layout, model = plan.recipe.layout, plan.recipe.model
    return Work(
        ranks=layout.gpus,
        on_gpu=plan.device == "cuda",
        layer_passes=layout.layers / layout.pp * layout.ga,
        shared_by=layout.gpus // layout.pp // layout.dp * (layout.ep if model.moe else 1),
        recompute=plan.recompute if isinstance(plan, EnginePlan) else None,
        saves=plan.checkpoint_interval is not None,
        experts=_expert_work(plan),
    )


def _expert_work(plan: Plan) -> ExpertWork | None:
    recipe, layout, model = plan.recipe, plan.recipe.layout, plan.recipe.model
    if model.moe is None or layout.ep == 1:
        return None
    again = isinstance(plan, EnginePlan) and plan.recompute == "full"
    exchanges, element_bytes = 4, 4 if recipe.dtype is Dtype.FP32 else 2
    return ExpertWork(
        flops_share=routed_share(model, layout.seq_len),
        rows=layout.mbs * layout.seq_len * model.moe.top_k * layout.etp / (layout.cp * layout.tp),
        exchanged_bytes=exchanges * element_bytes * model.hidden_size / layout.etp,
        passes=(FROZEN_PASSES if recipe.task == "lora" else PASSES) + again,
    )


def node_of_ranks(environment: Environment) -> dict[int, str]:
    """Return the node of each rank; ranks are numbered node by node."""
    each = [node for node in environment.nodes for _ in range(environment.ranks_per_node.get(node, 0))]
    return dict(enumerate(each))


def _throttled(environment: Environment, result: Result | None) -> tuple[Throttle, ...] | None:
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


def _baseline(run: AnalyzedRun, against: AnalyzedRun, steps: Sequence[Step]) -> ReferenceEvidence | None:
    if against.step_time_s is None:
        return None
    own, other = _sequences(run.recipe), _sequences(against.recipe)
    scale = own / other if own and other else 1.0
    found = (
        *differences(against.identity.configuration, run.identity.configuration),
        *definite_differences(_kept(against.conditions), _kept(run.conditions)),
    )
    window = against.window if against.window != run.window else None
    reference = Reference(
        kind="baseline",
        step_time_s=against.step_time_s.mean * scale,
        window=window,
        source=f"run {against.id}" + (f", for {own:g} sequences per GPU" if scale != 1 else ""),
    )
    return ReferenceEvidence(
        reference=reference,
        differing=tuple(map(_as_text, found)),
        evidence=_evidence(against, _steps_of(against)),
        window_mean_s=_mean_in(window, steps),
    )


def _sequences(recipe: Recipe | None) -> float | None:
    return recipe.layout.gbs / recipe.layout.gpus if recipe else None


def _kept(conditions: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in conditions.items() if key.startswith(CONDITIONS) or rule_of(key).important}


def _as_text(item: Difference) -> Condition:
    own, reference = (None if value is None else str(value) for value in (item.after, item.before))
    return Condition(key=item.key, own=own, reference=reference, effect="noted")


def _of_verdict(verdict: Verdict | None, run: AnalyzedRun, steps: Sequence[Step]) -> ReferenceEvidence | None:
    if verdict is None or verdict.reference is None:
        return None
    reference = verdict.reference
    window = reference.window if reference.window != run.window else None
    return ReferenceEvidence(reference=reference, differing=verdict.conditions, window_mean_s=_mean_in(window, steps))


def _mean_in(window: Window | None, steps: Sequence[Step]) -> float | None:
    if window is None:
        return None
    inside = [step.step_time_s for step in steps if step.step in window and not step.profiled]
    return fmean(inside) if len(inside) == window.size else None


def _words(run: AnalyzedRun) -> dict[str, str]:
    recipe = run.recipe
    if recipe is None:
        unknown = {"workload": "WORKLOAD", "size": "SIZE", "gpu_type": "TYPE", "last_rank": "N"}
        return {"run": str(run.path), "command": "llmb run -w WORKLOAD -s SIZE", **unknown}
    job = run.record.job if run.record else None
    starts = "submit" if job and job.scheduler != LOCAL else "run"
    file = recipe.config_file
    model = f"--model-config {shlex.quote(file.path)}" if file else f"-w {recipe.workload} -s {recipe.size}"
    program = run.record.program if run.record else ENGINE
    model += "" if program == ENGINE else f" --framework {program}"
    options = f"--dtype {recipe.dtype.value} --gpu-type {recipe.gpu_type} --scale {recipe.scale}"
    return {
        "run": str(run.path),
        "command": f"llmb {starts} {model} {options}",
        "workload": recipe.workload,
        "size": recipe.size,
        "gpu_type": recipe.gpu_type,
        "last_rank": str(recipe.layout.gpus - 1),
    }

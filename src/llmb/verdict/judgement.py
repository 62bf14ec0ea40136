# SPDX-License-Identifier: Apache-2.0
"""Verdicts on runs, by a single step time or by other runs, with tolerances and one-line summaries."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from llmb.base.errors import UsageError
from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics, describe, student_t
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.runs.analyzed_run import AnalyzedRun, flaw_of
from llmb.runs.conditions import (
    BETWEEN_RUNS,
    EXPLAINED,
    condition_values,
    differing,
    disturbances,
    fault_texts,
    find_conditions,
    merged,
    together,
)
from llmb.runs.result import (
    BETTER,
    CHANGED_COPY,
    ERROR_AT_END,
    OTHER_WORK,
    UNLIKE_NODES,
    Condition,
    Interval,
    Reference,
    ReferenceKind,
    Verdict,
    VerdictName,
)
from llmb.verdict.group_difference import (
    ASSUMED_SPREAD_PCT,
    MOST_MORE_RUNS,
    NO_INTERVAL,
    NORMAL_QUANTILE,
    GroupDifference,
    RunMean,
    RunSpread,
    clear_decision,
    decide,
    group_difference,
    smallest_change,
    spread_note,
    unseen,
)

WINDOW = "window"
MOST_DIGITS = 4
MOST_FASTER_PCT = 90.0
"""A run that is faster than its reference by more is not comparable with it."""
UNDECIDED = "the interval contains the tolerance"
NAMES: dict[ReferenceKind, str] = {
    "published": "published",
    "baseline": "the baseline",
    "expectation": "expected",
    "prediction": "predicted",
}
"""Names of references in sentences such as 'slower than ...'."""
FIGURES: dict[ReferenceKind, str] = {
    "published": "the published figure",
    "baseline": "the baseline",
    "expectation": "the expected figure",
    "prediction": "the predicted step time",
}
TOLERATED: dict[VerdictName, str] = {
    "pass": "within the tolerance of",
    "regressed": "more than the tolerance of",
    "improved": "more than the tolerance of",
    "inconclusive": "tolerance",
}

SPOILED = {
    OTHER_WORK: "during",
    UNLIKE_NODES: "nodes unlike each other in",
    ERROR_AT_END: "an error after the last step of",
}
"""Phrases for faults, to be followed by the affected run."""


def headline(verdict: Verdict) -> str:
    """Return the verdict in capitals, '(soft)' if it is, and its sentence, without repeating the verdict."""
    soft = " (soft)" if verdict.soft and verdict.verdict not in ("invalid", "not comparable") else ""
    rest = verdict.sentence.removeprefix(verdict.verdict)
    return f"{verdict.verdict.upper()}{soft}{rest if rest[:1] in (':', ' ') else f': {rest}'}"


def with_sentence(verdict: Verdict) -> Verdict:
    return verdict.model_copy(update={"sentence": "; ".join(_parts(verdict))})


def _parts(verdict: Verdict) -> Iterator[str]:
    kind: ReferenceKind = verdict.reference.kind if verdict.reference else "baseline"
    if verdict.verdict == "invalid":
        yield f"invalid: {verdict.reason}"
        return
    found = (condition for condition in verdict.conditions if condition.key in EXPLAINED)
    sides = [pair for condition in found for pair in ((condition.own, ""), (condition.reference, f"{FIGURES[kind]}: "))]
    faults = tuple(f"{whose}{what}" for what, whose in sides if what)
    if verdict.delta_pct is None:
        with_what = f" with {FIGURES[kind]}" if verdict.reference and verdict.verdict == "not comparable" else ""
        yield f"{verdict.verdict}{with_what}: {'; '.join(filter(None, (*faults, verdict.reason)))}"
        return
    if verdict.verdict == "not comparable":
        reasons = "; ".join(filter(None, (*faults, verdict.reason)))
        yield f"not comparable with {FIGURES[kind]}: {reasons} ({_difference(verdict, kind)})"
        return
    digits = _digits(verdict.tolerance_pct, verdict.delta_pct, *(verdict.ci95_pct or ()))
    first = "; ".join((*faults, f"{_difference(verdict, kind, digits)}{_tolerance(verdict, digits)}"))
    yield f"inconclusive: {first}" if verdict.verdict == "inconclusive" else first
    yield from _reasons(verdict)
    yield from _weaknesses(verdict, kind)
    yield from _shown(verdict)


def _digits(limit: float | None, *values: float) -> int:
    if limit is None:
        return 1
    near = [abs(value) for value in values if abs(abs(value) - limit) > 10**-MOST_DIGITS]
    fitting = (n for n in range(1, MOST_DIGITS) if percent(limit, n) not in [percent(value, n) for value in near])
    return next(fitting, MOST_DIGITS)


def _difference(verdict: Verdict, kind: ReferenceKind, digits: int = 1) -> str:
    delta = verdict.delta_pct
    assert delta is not None, "a verdict on a difference has one"
    runs = verdict.reference.runs if verdict.reference else None
    name = NAMES[kind] + (f" of {runs} runs" if kind == "baseline" and runs and runs > 1 else "")
    interval = f" ({_interval(verdict.ci95_pct, -1 if delta < 0 else 1, digits)})" if verdict.ci95_pct else ""
    if not float(percent(delta)):
        return f"as fast as {name}{interval}"
    return f"{percent(abs(delta), digits)} % {'slower' if delta > 0 else 'faster'} than {name}{interval}"


def _interval(interval: Interval, sign: int, digits: int) -> str:
    low, high = sorted(sign * end for end in interval)
    return f"{percent(low, digits)} to {percent(high, digits)} %"


def percent(value: float, digits: int = 1) -> str:
    """Format a percentage with ``digits`` decimals, but with at least two below 0.095, and with none from 1000 on."""
    digits = 0 if abs(value) >= 1000 else digits if abs(value) >= 0.095 else max(digits, 2)
    return f"{round(value, digits) + 0.0:.{digits if round(value, digits) else 1}f}"


def _tolerance(verdict: Verdict, digits: int) -> str:
    limit = verdict.tolerance_pct
    return "" if limit is None else f", {TOLERATED[verdict.verdict]} {percent(limit, digits)} %"


def _reasons(verdict: Verdict) -> Iterator[str]:
    if verdict.more_runs:
        yield f"{counted(verdict.more_runs, 'more run')} would settle it"
    reason = (verdict.reason or "").removeprefix(_unseen(verdict)).removeprefix("; ")
    if reason and not (verdict.more_runs and reason == UNDECIDED):
        yield reason


def _unseen(verdict: Verdict) -> str:
    interval, smallest, limit = verdict.ci95_pct, verdict.smallest_visible_change_pct, verdict.tolerance_pct
    if interval is None or smallest is None or limit is None:
        return ""
    return unseen(interval, smallest, limit) or ""


def _shown(verdict: Verdict) -> Iterator[str]:
    smallest, limit = verdict.smallest_visible_change_pct, verdict.tolerance_pct
    if smallest is None or verdict.verdict not in ("pass", "inconclusive"):
        return
    text = percent(smallest, _digits(limit, smallest))
    what = f"only a change above {text}" if limit is not None and smallest > limit else f"a change of {text}"
    yield f"{what} % would have shown"


def _weaknesses(verdict: Verdict, kind: ReferenceKind) -> Iterator[str]:
    weak = [condition for condition in verdict.conditions if condition.effect == "weakens"]
    for condition in weak:
        if condition.key == WINDOW and condition.own and condition.reference:
            own, other = _statistic(condition.own), _statistic(condition.reference)
            yield f"{FIGURES[kind]} is {other}, yours {own}"
        if title := SPOILED.get(condition.key):
            yield _spoiled(title, condition, FIGURES[kind])
    if others := [condition for condition in weak if condition.key not in (WINDOW, CHANGED_COPY, *SPOILED, *EXPLAINED)]:
        yield differing(others)
    if kind == "published":
        spread = "is of one run" if verdict.reference and verdict.reference.step_time_s_ci95 else "has no spread"
        yield f"a soft verdict: a single published figure {spread}"


def _spoiled(title: str, condition: Condition, reference: str) -> str:
    if not condition.own:
        return f"{title} {reference}: {_of_one(condition.reference or '')}"
    both = f" and {reference}" if condition.reference else ""
    return f"{title} yours{both}: {_of_one(condition.own)}"


def _of_one(text: str) -> str:
    first, *others = text.split(BETWEEN_RUNS)
    return f"{first} (and {len(others)} more like it)" if others else first


def _statistic(steps: str) -> str:
    if steps == "last":
        return "the last step's"
    return f"step {steps}'s" if steps.isdecimal() else f"the mean of {steps}"


DATA = Path(__file__).with_name("tolerances.yaml")
NO_SPREAD = "a single value has no interval"
SINGLE_RUN = f"one run: another may differ by {ASSUMED_SPREAD_PCT:g} % or more"
SINGLE_STEPS = f"one time each: a spread of {ASSUMED_SPREAD_PCT:g} % is assumed on either side"
TOO_MANY_RUNS = f"more than {MOST_MORE_RUNS} more runs would be needed"


class Tolerance(NamedTuple):
    """A tolerance in percent of the reference's step time, in both directions."""

    pct: float
    source: str


class ToleranceEntry(Record):
    """A default tolerance for a kind of reference."""

    kind: ReferenceKind
    same_nodes: bool = False
    """True if the tolerance only applies to a run on the nodes of its reference."""
    tolerance_pct: float = Field(gt=0)
    source: str


class ToleranceFile(Record):
    """The content of ``tolerances.yaml``."""

    defaults: tuple[ToleranceEntry, ...]


@cache
def _defaults() -> tuple[ToleranceEntry, ...]:
    return read_file(DATA, ToleranceFile, wrap="defaults").defaults


def tolerance_of(pct: float | None, name: str) -> Tolerance | None:
    """Return the tolerance ``pct`` set by option ``name``; None if unset. Raise UsageError unless 0 < ``pct`` < inf."""
    if pct is None:
        return None
    if not 0 < pct < inf:
        raise UsageError(f"{name} is {pct:g}; it must be a finite number above 0", do="pass a percentage, such as 3")
    return Tolerance(pct, name)


def default_tolerance(kind: ReferenceKind, *, same_nodes: bool = False) -> Tolerance:
    """Return the default tolerance; ``same_nodes`` is True if both sides are known to have had the same nodes."""
    entry = next(entry for entry in _defaults() if entry.kind == kind and (same_nodes or not entry.same_nodes))
    return Tolerance(entry.tolerance_pct, entry.source)


def stated_conditions(run: AnalyzedRun) -> dict[str, str]:
    computed = condition_values(run.configuration, unset="none")
    return computed | condition_values({**run.values, "nodes": ", ".join(sorted(run.nodes)) or None})


def times_of(runs: Sequence[AnalyzedRun]) -> Statistics | None:
    """Return the statistics of one run's steps, or of the means of several runs; None if none has statistics."""
    counted = [run for run in runs if flaw_of(run) is None] or runs
    known = [run.step_time_s for run in counted if run.step_time_s]
    if len(known) == 1:
        return known[0]
    return describe_runs([times.mean for times in known]) if known else None


def describe_runs(means_s: Sequence[float]) -> Statistics:
    """Return statistics of run means with Student's t interval.

    Raise ValueError for none, or one that is not finite.
    """
    found = describe(means_s)
    if found.std is None:
        return found
    half = student_t(found.count - 1, 0.975) * found.std / math.sqrt(found.count)
    return replace(found, ci95=(found.mean - half, found.mean + half), effective_count=None)


def judge_against_figure(
    repeats: Sequence[AnalyzedRun], reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance
) -> Verdict:
    """Judge whether a run, or the mean of repeats, is as fast as ``reference``; ``conditions`` differ between them."""
    all_conditions = (*_disturbances(repeats), *conditions)
    other_steps = reference.window is None or any(condition.key == WINDOW for condition in conditions)
    alike = reference.kind == "published" and not other_steps
    finding = _finding_against_figure(times_of(repeats), flaw_of(repeats[-1]), reference, tolerance, alike=alike)
    return judgement(finding, reference, all_conditions, tolerance)


def _finding_against_figure(
    times: Statistics | None, flaw: str | None, reference: Reference, tolerance: Tolerance, *, alike: bool
) -> Verdict:
    if times is None:
        return Verdict(verdict="invalid", soft=False, reason=flaw)
    delta, interval = single_difference(times, reference.step_time_s, reference.step_time_s_ci95)
    if interval is None and alike and not flaw:
        found = _decided(delta, _allowed((delta, delta), 2), tolerance.pct)
        return found.model_copy(update={"soft": True, "reason": "; ".join(filter(None, (_said(found), SINGLE_STEPS)))})
    found = _decided(delta, interval, tolerance.pct)
    if flaw:
        return found.model_copy(update={"verdict": "invalid", "reason": flaw})
    if interval is None or reference.kind not in ("expectation", "prediction"):
        return found
    allowed = _decided(delta, _allowed(interval), tolerance.pct)
    unsure = found.model_copy(update={"soft": True, "reason": SINGLE_RUN})
    return found if allowed.verdict == found.verdict else unsure


def _said(found: Verdict) -> str | None:
    return None if found.reason == UNDECIDED else found.reason


def single_difference(
    statistics: Statistics, reference_s: float, reference_ci95: tuple[float, float] | None = None
) -> tuple[float, tuple[float, float] | None]:
    """Return the mean's difference from ``reference_s`` in percent (above 0: slower) and its 95 % interval, None for
    one step.
    """
    if not reference_s > 0:
        raise ValueError("the reference step time has to be above 0")
    ratio = statistics.mean / reference_s
    if statistics.ci95 is None:
        return 100 * (ratio - 1), None
    widths = [(high - low) / 2 for low, high in (statistics.ci95, reference_ci95 or (reference_s, reference_s))]
    half = math.hypot(widths[0] / reference_s, ratio * widths[1] / reference_s)
    return 100 * (ratio - 1), (100 * (ratio - 1 - half), 100 * (ratio - 1 + half))


def _allowed(interval: Interval, values: int = 1) -> Interval:
    low, high = interval
    half = math.hypot((high - low) / 2, NORMAL_QUANTILE * ASSUMED_SPREAD_PCT * math.sqrt(values))
    return (low + high) / 2 - half, (low + high) / 2 + half


def _decided(delta: float, interval: Interval | None, tolerance_pct: float) -> Verdict:
    if interval is None:
        return Verdict(verdict="inconclusive", soft=False, delta_pct=delta, reason=NO_SPREAD)
    smallest = smallest_change((interval[1] - interval[0]) / 2)
    clear = clear_decision(delta, interval, smallest, tolerance_pct)
    return Verdict(
        verdict=clear or "inconclusive",
        soft=False,
        delta_pct=delta,
        ci95_pct=interval,
        smallest_visible_change_pct=smallest,
        reason=None if clear else unseen(interval, smallest, tolerance_pct) or UNDECIDED,
    )


def judge_against_runs(
    runs: Sequence[AnalyzedRun],
    baseline: Sequence[AnalyzedRun],
    reference: Reference,
    tolerance: Tolerance | None = None,
    known: RunSpread | None = None,
) -> Verdict:
    """Judge whether ``runs`` are as fast as ``baseline``, which must not be empty; ``known`` is the spread of other
    repeats.
    """
    valid = [run for run in runs if flaw_of(run) is None]
    counted = valid or runs
    nodes = {node for run in counted for node in run.nodes}
    same_nodes = bool(nodes) and nodes == {node for run in baseline for node in run.nodes}
    limit = tolerance or default_tolerance("baseline", same_nodes=same_nodes)
    conditions = (*_disturbances(counted, baseline), *find_conditions(_side(counted), _side(baseline), reference.kind))
    if not valid:
        flaws = dict.fromkeys(filter(None, map(flaw_of, runs)))
        return judgement(Verdict(verdict="invalid", soft=False, reason="; ".join(flaws)), reference, conditions, limit)
    difference = group_difference(means_of(baseline), means_of(valid), known)
    finding = _finding_against_runs(difference, limit, unknown_scale((*valid, *baseline)))
    return judgement(finding, reference, conditions, limit)


def unknown_scale(runs: Iterable[AnalyzedRun]) -> str | None:
    """Return why a comparison of ``runs`` is soft if none reports its number of GPUs; None if one does."""
    return None if any(run.gpus for run in runs) else "neither side reports its number of GPUs"


def _disturbances(runs: Sequence[AnalyzedRun], baseline: Sequence[AnalyzedRun] = ()) -> Iterator[Condition]:
    own, other = (together(fault_texts(run.faults, run.id) for run in side) for side in (runs, baseline))
    return disturbances(own, other)


def _side(runs: Sequence[AnalyzedRun]) -> dict[str, str]:
    nodes = sorted({node for run in runs for node in run.nodes})
    return merged(map(stated_conditions, runs)) | ({"nodes": ", ".join(nodes)} if nodes else {})


def _finding_against_runs(difference: GroupDifference, tolerance: Tolerance, doubt: str | None) -> Verdict:
    decision = decide(difference, tolerance.pct)
    interval, smallest = difference.ci95_pct, difference.smallest_visible_change_pct
    why = NO_INTERVAL if interval is None or smallest is None else unseen(interval, smallest, tolerance.pct)
    notes = [why, spread_note(difference) if why != NO_INTERVAL else None, difference.node_effect, doubt]
    undecided = UNDECIDED if decision.more_runs else TOO_MANY_RUNS
    return Verdict(
        verdict=decision.verdict,
        delta_pct=difference.delta_pct,
        ci95_pct=difference.ci95_pct,
        smallest_visible_change_pct=difference.smallest_visible_change_pct,
        soft=difference.noise_pct is None or doubt is not None,
        more_runs=decision.more_runs,
        reason="; ".join(filter(None, notes)) or (undecided if decision.verdict == "inconclusive" else None),
    )


def means_of(runs: Iterable[AnalyzedRun]) -> list[RunMean]:
    return [
        RunMean(mean_s=run.step_time_s.mean, ci95_s=run.step_time_s.ci95, nodes=run.nodes)
        for run in runs
        if run.step_time_s
    ]


def judgement(
    finding: Verdict, reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance | None
) -> Verdict:
    """Return ``finding``, the verdict on the difference alone, weakened or replaced as the conditions require."""
    verdict, reason = finding.verdict, finding.reason
    prevented = [condition for condition in conditions if condition.effect == "prevents"]
    if prevented and verdict != "invalid":
        verdict, reason = "not comparable", differing(prevented)
    if verdict in BETTER and finding.delta_pct is not None and finding.delta_pct < -MOST_FASTER_PCT:
        verdict, reason = "not comparable", "more than 10 times as fast: a unit or the work differs"
    if verdict in BETTER and (doubts := [said for one in conditions for said in _doubts(one)]):
        verdict, reason = "inconclusive", "; ".join(filter(None, (reason, *dict.fromkeys(doubts))))
    weakened = any(condition.effect == "weakens" for condition in conditions)
    known = {
        "verdict": verdict,
        "soft": finding.soft or weakened or reference.kind == "published",
        "tolerance_pct": tolerance.pct if tolerance else None,
        "tolerance_source": tolerance.source if tolerance else None,
        "reference": reference,
        "conditions": tuple(conditions),
        "more_runs": finding.more_runs if verdict == "inconclusive" else None,
        "reason": reason,
    }
    return with_sentence(finding.model_copy(update=known))


def _doubts(condition: Condition) -> Iterator[str]:
    if condition.key == CHANGED_COPY:
        yield from filter(None, (condition.own, condition.reference))


def without_reference(verdict: VerdictName, reason: str) -> Verdict:
    """Return the verdict of a run without a reference, or of a recipe without a run."""
    return with_sentence(Verdict(verdict=verdict, soft=False, reason=reason))

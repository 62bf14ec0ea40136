# SPDX-License-Identifier: Apache-2.0
"""Verdicts: of a run against a figure, of runs against runs, how much slower each may be, and what conditions leave of
them. Pure but for its table of tolerances."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.metrics.group_difference import (
    ASSUMED_SPREAD_PCT,
    MOST_MORE_RUNS,
    NO_INTERVAL,
    NORMAL_QUANTILE,
    GroupDifference,
    KnownSpread,
    RunMean,
    clear_decision,
    decide,
    group_difference,
    smallest_change,
    spread_note,
    unseen,
)
from llmb.metrics.statistics import Statistics
from llmb.verdict.conditions import (
    BETTER,
    CHANGED_COPY,
    Condition,
    Interval,
    Reference,
    ReferenceKind,
    Values,
    Verdict,
    VerdictName,
    differing,
    disturbances,
    find_conditions,
    merged,
    together,
)
from llmb.verdict.sentence import UNDECIDED, WINDOW, with_sentence

DATA = Path(__file__).with_name("tolerances.yaml")
NO_SPREAD = "a single value has no interval"
SINGLE_RUN = f"one run: another one may differ by {ASSUMED_SPREAD_PCT:g} % and more"
SINGLE_STEPS = f"one time each: another may differ, for which {ASSUMED_SPREAD_PCT:g} % is allowed on either side"
TOO_MANY_RUNS = f"more than {MOST_MORE_RUNS} more runs would be needed"


class Tolerance(NamedTuple):
    """In percent of the reference's step time; it holds in both directions."""

    pct: float
    source: str


class ToleranceEntry(Record):
    """A default."""

    kind: ReferenceKind
    same_nodes: bool = False
    """Only where the run and its reference have the same nodes."""
    tolerance_pct: float = Field(gt=0)
    source: str


class ToleranceFile(Record):
    """``tolerances.yaml``."""

    defaults: tuple[ToleranceEntry, ...]


@cache
def _defaults() -> tuple[ToleranceEntry, ...]:
    return read_file(DATA, ToleranceFile, wrap="defaults").defaults


def given_tolerance(pct: float | None, name: str) -> Tolerance | None:
    """That of the option or argument ``name``, if it is given. Raises UsageError unless it is a percentage above 0."""
    if pct is None:
        return None
    if not 0 < pct < inf:
        raise UsageError(f"{name} {pct:g} is invalid", do="give a percentage above 0")
    return Tolerance(pct, name)


def default_tolerance(kind: ReferenceKind, *, same_nodes: bool = False) -> Tolerance:
    """``same_nodes``: the run and its reference are known to have had the same nodes."""
    entry = next(entry for entry in _defaults() if entry.kind == kind and (same_nodes or not entry.same_nodes))
    return Tolerance(entry.tolerance_pct, entry.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, or a log, that is judged or judged against."""

    step_time_s: Statistics | None
    """Statistics of its window."""
    flaw: str | None = None
    """Why it is not a measurement; None if it is one."""
    conditions: Values = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    faults: Values = field(default_factory=dict)
    """What is known to have disturbed it, by the key of its condition, the most important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How the step time differs from the reference, in percent of it, and what that would mean by itself."""

    verdict: VerdictName
    delta_pct: float | None = None
    ci95_pct: Interval | None = None
    smallest_visible_change_pct: float | None = None
    soft: bool = False
    more_runs: int | None = None
    reason: str | None = None
    """Why it is not clear, or soft."""


def judge_against_figure(
    measured: Measured, reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance
) -> Verdict:
    """Whether the run is as fast as ``reference`` says, within ``tolerance``; ``conditions`` are what differs."""
    all_conditions = (*_disturbances([measured]), *conditions)
    other_steps = reference.window is None or any(condition.key == WINDOW for condition in conditions)
    alike = reference.kind == "published" and not other_steps
    finding = _finding_against_figure(measured, reference, tolerance, alike=alike)
    return judgement(finding, reference, all_conditions, tolerance)


def _finding_against_figure(measured: Measured, reference: Reference, tolerance: Tolerance, *, alike: bool) -> Finding:
    """``alike``: the figure is the same statistic of the same steps, which may be one line of a log."""
    times = measured.step_time_s
    if times is None:
        return Finding(verdict="invalid", reason=measured.flaw or "it has no statistics")
    delta, interval = single_difference(times, reference.step_time_s, reference.step_time_s_ci95)
    if interval is None and alike and not measured.flaw:
        found = _decided(delta, _allowed((delta, delta), 2), tolerance.pct)
        return replace(found, soft=True, reason="; ".join(filter(None, (_said(found), SINGLE_STEPS))))
    found = _decided(delta, interval, tolerance.pct)
    if measured.flaw:
        return replace(found, verdict="invalid", reason=measured.flaw)
    if interval is None or reference.kind != "expectation":
        return found
    allowed = _decided(delta, _allowed(interval), tolerance.pct)
    return found if allowed.verdict == found.verdict else replace(found, soft=True, reason=SINGLE_RUN)


def _said(found: Finding) -> str | None:
    """Its reason, if that says more than that the verdict is not clear."""
    return None if found.reason == UNDECIDED else found.reason


def single_difference(
    statistics: Statistics, reference_s: float, reference_ci95: tuple[float, float] | None = None
) -> tuple[float, tuple[float, float] | None]:
    """The run's mean relative to ``reference_s`` in percent, above 0 slower, and the 95 % confidence interval of that.

    The interval is None for a run with a single step. Raises ValueError for a reference that is not above 0.
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
    """The interval if each of so many values may be another by the assumed spread the next time."""
    low, high = interval
    half = math.hypot((high - low) / 2, NORMAL_QUANTILE * ASSUMED_SPREAD_PCT * math.sqrt(values))
    return (low + high) / 2 - half, (low + high) / 2 + half


def _decided(delta: float, interval: Interval | None, tolerance_pct: float) -> Finding:
    if interval is None:
        return Finding(verdict="inconclusive", delta_pct=delta, reason=NO_SPREAD)
    smallest = smallest_change((interval[1] - interval[0]) / 2)
    clear = clear_decision(delta, interval, smallest, tolerance_pct)
    return Finding(
        verdict=clear or "inconclusive",
        delta_pct=delta,
        ci95_pct=interval,
        smallest_visible_change_pct=smallest,
        reason=None if clear else unseen(interval, smallest, tolerance_pct) or UNDECIDED,
    )


def judge_against_runs(
    runs: Sequence[Measured],
    baseline: Sequence[Measured],
    reference: Reference,
    tolerance: Tolerance | None = None,
    known: KnownSpread | None = None,
) -> Verdict:
    """Whether ``runs``, repeats of each other, are as fast as those of ``baseline``, which is not empty.

    ``reference`` describes the baseline. Without ``tolerance``, the default for these nodes holds. ``known``: how much
    earlier repeats differed, for a single run on each side.
    """
    valid = [run for run in runs if run.step_time_s and not run.flaw]
    counted = valid or runs
    nodes = {node for run in counted for node in run.nodes}
    same_nodes = bool(nodes) and nodes == {node for run in baseline for node in run.nodes}
    limit = tolerance or default_tolerance("baseline", same_nodes=same_nodes)
    conditions = (*_disturbances(counted, baseline), *find_conditions(_side(counted), _side(baseline), reference.kind))
    if not valid:
        flaws = dict.fromkeys(run.flaw or "it has no statistics" for run in runs)
        return judgement(Finding(verdict="invalid", reason="; ".join(flaws)), reference, conditions, limit)
    difference = group_difference(means_of(baseline), means_of(valid), known)
    return judgement(_finding_against_runs(difference, limit), reference, conditions, limit)


def _disturbances(runs: Sequence[Measured], baseline: Sequence[Measured] = ()) -> Iterator[Condition]:
    own, other = (together(run.faults for run in side) for side in (runs, baseline))
    return disturbances(own, other)


def _side(runs: Sequence[Measured]) -> dict[str, str]:
    nodes = sorted({node for run in runs for node in run.nodes})
    return merged(run.conditions for run in runs) | ({"nodes": ", ".join(nodes)} if nodes else {})


def _finding_against_runs(difference: GroupDifference, tolerance: Tolerance) -> Finding:
    decision = decide(difference, tolerance.pct)
    interval, smallest = difference.ci95_pct, difference.smallest_visible_change_pct
    why = NO_INTERVAL if interval is None or smallest is None else unseen(interval, smallest, tolerance.pct)
    notes = [why, spread_note(difference) if why != NO_INTERVAL else None, difference.node_effect]
    undecided = UNDECIDED if decision.more_runs else TOO_MANY_RUNS
    return Finding(
        verdict=decision.verdict,
        delta_pct=difference.delta_pct,
        ci95_pct=difference.ci95_pct,
        smallest_visible_change_pct=difference.smallest_visible_change_pct,
        soft=difference.noise_pct is None,
        more_runs=decision.more_runs,
        reason="; ".join(filter(None, notes)) or (undecided if decision.verdict == "inconclusive" else None),
    )


def means_of(runs: Iterable[Measured]) -> list[RunMean]:
    return [
        RunMean(mean_s=run.step_time_s.mean, ci95_s=run.step_time_s.ci95, nodes=run.nodes)
        for run in runs
        if run.step_time_s
    ]


def judgement(
    finding: Finding, reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance | None
) -> Verdict:
    """The finding as far as the conditions allow it."""
    verdict, reason = finding.verdict, finding.reason
    prevented = [condition for condition in conditions if condition.effect == "prevents"]
    if prevented and verdict != "invalid":
        verdict, reason = "not comparable", differing(prevented)
    if verdict in BETTER and (doubts := [said for one in conditions for said in _doubts(one)]):
        verdict, reason = "inconclusive", "; ".join(filter(None, (reason, *dict.fromkeys(doubts))))
    weakened = any(condition.effect == "weakens" for condition in conditions)
    return with_sentence(
        Verdict(
            verdict=verdict,
            soft=finding.soft or weakened or reference.kind == "published",
            delta_pct=finding.delta_pct,
            ci95_pct=finding.ci95_pct,
            smallest_visible_change_pct=finding.smallest_visible_change_pct,
            tolerance_pct=tolerance.pct if tolerance else None,
            tolerance_source=tolerance.source if tolerance else None,
            reference=reference,
            conditions=tuple(conditions),
            more_runs=finding.more_runs if verdict == "inconclusive" else None,
            reason=reason,
        )
    )


def _doubts(condition: Condition) -> Iterator[str]:
    if condition.key == CHANGED_COPY:
        yield from filter(None, (condition.own, condition.reference))


def without_reference(verdict: VerdictName, reason: str) -> Verdict:
    """Verdict of a run that there is nothing to compare with, or of a recipe without a run."""
    return with_sentence(Verdict(verdict=verdict, soft=False, reason=reason))

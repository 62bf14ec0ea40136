# SPDX-License-Identifier: Apache-2.0
"""A run against one figure: a published one, or one that the user expects. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from llmb.metrics.group_difference import ASSUMED_SPREAD_PCT, NORMAL_QUANTILE
from llmb.metrics.statistics import Statistics
from llmb.verdict.conditions import other_work
from llmb.verdict.judgement import UNDECIDED, Finding, Measured, judgement
from llmb.verdict.records import Condition, Interval, Reference, Verdict
from llmb.verdict.tolerance import Tolerance


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


NO_SPREAD = "a single value has no interval"
SINGLE_RUN = f"one run: another one may differ by {ASSUMED_SPREAD_PCT:g} % and more"


def judge(measured: Measured, reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance) -> Verdict:
    """Whether the run is as fast as ``reference`` says, within ``tolerance``; ``conditions`` are what differs."""
    all_conditions = (*other_work([measured.disturbed]), *conditions)
    return judgement(_finding(measured, reference, tolerance), reference, all_conditions, tolerance)


def _finding(measured: Measured, reference: Reference, tolerance: Tolerance) -> Finding:
    times = measured.step_time_s
    if times is None:
        return Finding(verdict="invalid", reason=measured.flaw or "it has no statistics")
    delta, interval = single_difference(times, reference.step_time_s, reference.step_time_s_ci95)
    if measured.flaw:
        return Finding(verdict="invalid", delta_pct=delta, ci95_pct=interval, reason=measured.flaw)
    found = _decided(delta, interval, tolerance.pct)
    if interval is None or reference.kind != "expectation":
        return found
    allowed = _decided(delta, _allowed(interval), tolerance.pct)
    return found if allowed.verdict == found.verdict else replace(found, soft=True, reason=SINGLE_RUN)


def _allowed(interval: Interval) -> Interval:
    """The same where the next run may differ from this one by the assumed spread."""
    low, high = interval
    half = math.hypot((high - low) / 2, NORMAL_QUANTILE * ASSUMED_SPREAD_PCT)
    return (low + high) / 2 - half, (low + high) / 2 + half


def _decided(delta: float, interval: Interval | None, tolerance_pct: float) -> Finding:
    """By the same rule as ``metrics.group_difference.decide``."""
    if interval is None:
        return Finding(verdict="inconclusive", delta_pct=delta, reason=NO_SPREAD)
    low, high = interval
    if low > 0 and delta > tolerance_pct:
        return Finding(verdict="regressed", delta_pct=delta, ci95_pct=interval)
    if high < 0 and delta < -tolerance_pct:
        return Finding(verdict="improved", delta_pct=delta, ci95_pct=interval)
    if high <= tolerance_pct:
        return Finding(verdict="pass", delta_pct=delta, ci95_pct=interval)
    return Finding(verdict="inconclusive", delta_pct=delta, ci95_pct=interval, reason=UNDECIDED)

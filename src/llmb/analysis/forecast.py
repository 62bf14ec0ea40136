# SPDX-License-Identifier: Apache-2.0
"""The present pace of a run that has not ended, when it will end, and how it compares with what is expected. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llmb.metrics.statistics import Statistics, describe
from llmb.metrics.steady_state import FEWEST_STEPS, steady_window
from llmb.runs.steps import StepNews

NORMAL_95 = 1.96
REPEATED_LOOKS = 1.7
"""Factor on a 95 % interval that makes it one of 99.9 %: who looks often must not see a chance as a difference."""
Standing = Literal["too early", "undecided", "as expected", "slower", "faster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Step times of the stretch of steps that goes on at present."""

    first_step: int
    last_step: int
    step_time_s: Statistics
    steady: bool
    """False while there are too few steps, or no stretch of them has a constant level."""
    before_s: float | None = None
    """Median of the steady stretch before it, where the level changed; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How long the remaining steps take from now on, with a 95 % interval, or None while steps are not steady."""

    steps_left: int
    remaining_s: float
    remaining_s_ci95: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The step time that a run should have, and who says so."""

    step_time_s: float
    source: str
    tolerance_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastComparison:
    """How the pace stands to the expectation. Percentages are of the expected step time; above 0 is slower."""

    expected: Expected
    standing: Standing
    delta_pct: float | None
    interval_pct: tuple[float, float] | None
    """Wider than that of 95 %, because it is looked at after every step."""
    more_steps: int | None
    """How many more steps are needed at least; None if their number is not what is missing."""


def find_pace(steps: Sequence[StepNews]) -> Pace | None:
    """The pace of the steps of one attempt, in order; None without a step whose time counts.

    The longest steady stretch counts, or what has followed it since if that is long enough to be a level of its own.
    Without one, all steps but the first do, which is slow in most runs.
    """
    counted = [step for step in steps if not step.profiled and math.isfinite(step.step_time_s)]
    if not counted:
        return None
    times = [step.step_time_s for step in counted]
    found = steady_window(times, 0)
    if found is None:
        first = min(1, len(times) - 1)
        return _pace(counted, first, len(times) - 1, steady=False)
    since = found.last + 1
    if len(times) - since < FEWEST_STEPS:
        return _pace(counted, found.first, found.last, steady=True)
    before = describe(times[found.first : since]).median
    later = steady_window(times[since:], since)
    first, last = (later.first, later.last) if later else (since, len(times) - 1)
    return _pace(counted, first, last, steady=later is not None, before_s=before)


def _pace(steps: Sequence[StepNews], first: int, last: int, *, steady: bool, before_s: float | None = None) -> Pace:
    inside = steps[first : last + 1]
    return Pace(
        first_step=inside[0].step,
        last_step=inside[-1].step,
        step_time_s=describe([step.step_time_s for step in inside]),
        steady=steady,
        before_s=before_s,
    )


def forecast(pace: Pace, steps_left: int, since_last_s: float) -> Forecast:
    """``since_last_s`` seconds have passed since the last step.

    The interval covers the uncertainty of the mean, which all remaining steps share, and their own spread.
    """
    times = pace.step_time_s
    expected_s = steps_left * times.mean
    interval = None
    if pace.steady and times.ci95 and times.std is not None:
        of_mean = steps_left * (times.ci95[1] - times.mean)
        independent = (times.effective_count or times.count) / times.count
        of_steps = NORMAL_95 * times.std * math.sqrt(steps_left / independent)
        half = math.hypot(of_mean, of_steps)
        interval = (_left(expected_s - half, since_last_s), _left(expected_s + half, since_last_s))
    return Forecast(steps_left=steps_left, remaining_s=_left(expected_s, since_last_s), remaining_s_ci95=interval)


def _left(all_s: float, since_last_s: float) -> float:
    return max(0.0, all_s - since_last_s)


def compare_with(expected: Expected, pace: Pace | None) -> ForecastComparison:
    """Too early to tell before ten steps, and while they are not steady."""
    if pace is None or not pace.steady or pace.step_time_s.ci95 is None:
        missing = FEWEST_STEPS + 1 - (pace.step_time_s.count if pace else 0)
        more = missing if missing > 0 else None
        return ForecastComparison(
            expected=expected, standing="too early", delta_pct=None, interval_pct=None, more_steps=more
        )
    times, own = pace.step_time_s, expected.step_time_s
    half = REPEATED_LOOKS * (pace.step_time_s.ci95[1] - times.mean)
    low, delta, high = (100 * (value / own - 1) for value in (times.mean - half, times.mean, times.mean + half))
    return ForecastComparison(
        expected=expected,
        standing=_standing(low, high, expected.tolerance_pct),
        delta_pct=delta,
        interval_pct=(low, high),
        more_steps=None,
    )


def _standing(low: float, high: float, tolerance_pct: float) -> Standing:
    if low > tolerance_pct:
        return "slower"
    if high < -tolerance_pct:
        return "faster"
    return "as expected" if low >= -tolerance_pct and high <= tolerance_pct else "undecided"

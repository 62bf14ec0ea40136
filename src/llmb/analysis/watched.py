# SPDX-License-Identifier: Apache-2.0
"""What is seen of a run that has not ended: its pace, when it will end, and what gives cause for concern. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmb.metrics.statistics import Statistics, describe
from llmb.metrics.steady_state import FEWEST_STEPS, steady_window
from llmb.runs.steps import StepNews
from llmb.verdict.causes_evidence import Evidence, Work
from llmb.verdict.causes_measured import FoundCause, slow_rank

NORMAL_95 = 1.96
REPEATED_LOOKS = 1.7
"""Factor on a 95 % interval that makes it one of 99.9 %: who looks often must not see a chance as a difference."""
Standing = Literal["too early", "undecided", "as expected", "slower", "faster"]
State = Literal["queued", "starting", "running", "ended"]
Kind = Literal["off_expectation", "slowed_down", "stalled", "not_finite", "slow_rank", "time_limit"]
KEPT_STEPS = 2000
"""How many of the last steps of a long run are looked at."""
STALLED_STEPS, LEAST_STALL_S = 5.0, 10.0
"""No step for so many medians, and seconds, is a stall; a checkpoint may take as long."""
RANK_STEPS = 20
"""A rank is slow if it is so in the last steps."""
SLOWED_PCT = 3.0


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


@dataclass(slots=True)
class StepHistory:
    """The steps of the latest attempt."""

    steps: list[StepNews] = field(default_factory=list)
    count: int = 0
    """Number of all steps that were seen, also in earlier attempts."""
    first_loss: float | None = None
    bad: StepNews | None = None
    """The first step with a loss or gradient norm that is not finite."""

    def add(self, step: StepNews) -> None:
        """A step that is not later than the last one begins a new attempt."""
        if self.steps and step.step <= self.steps[-1].step:
            self.steps.clear()
            self.first_loss, self.bad = None, None
        if not self.steps:
            self.first_loss = step.loss
        if self.bad is None and not all(math.isfinite(value or 0) for value in (step.loss, step.grad_norm)):
            self.bad = step
        self.steps.append(step)
        self.count += 1
        if len(self.steps) > 2 * KEPT_STEPS:
            del self.steps[:-KEPT_STEPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What is known of a run beside its steps. None is unknown."""

    state: State
    why: str | None = None
    """What a queued run waits for, or how it ended."""
    nodes: str | None = None
    since_start_s: float | None = None
    """Seconds since the start of the latest attempt."""
    attempt: int = 1
    attempt_first_step: int = 0
    """Steps before it are of earlier attempts."""
    first_step: int = 0
    last_step: int | None = None
    limit_left_s: float | None = None
    """Until the job's time limit."""
    stall: str | None = None
    """What the ranks of a hung run report."""
    work: Work | None = None
    """What each rank computes; None for a log without a record."""
    node_of: Mapping[int, str] = field(default_factory=dict)
    """By rank."""


@dataclass(frozen=True, slots=True)
class Concern:
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Everything that is known of a run at one moment."""

    at_s: float
    """Seconds since 1970."""
    circumstances: Circumstances
    steps: tuple[StepNews, ...]
    """The last ones."""
    first_loss: float | None
    since_last_s: float | None
    pace: Pace | None
    forecast: Forecast | None
    comparison: ForecastComparison | None
    concerns: tuple[Concern, ...]

    @property
    def done(self) -> int:
        """Steps of the run that are done."""
        return self.steps[-1].step + 1 - self.circumstances.first_step if self.steps else 0

    @property
    def total(self) -> int | None:
        last = self.circumstances.last_step
        return None if last is None else last + 1 - self.circumstances.first_step


def outlook(
    now_s: float, here: Circumstances, history: StepHistory, since_last_s: float | None, expected: Expected | None
) -> Outlook:
    """``since_last_s`` seconds have passed since the last step, or since the start if there is none."""
    steps = [step for step in history.steps if step.step >= here.attempt_first_step][-KEPT_STEPS:]
    pace = find_pace(steps)
    lasts = here.state != "ended"
    ends = None
    if lasts and pace and here.last_step is not None:
        ends = forecast(pace, here.last_step - steps[-1].step, since_last_s or 0.0)
    comparison = compare_with(expected, pace) if expected else None
    return Outlook(
        at_s=now_s,
        circumstances=here,
        steps=tuple(history.steps[-KEPT_STEPS:]),
        first_loss=history.first_loss,
        since_last_s=since_last_s,
        pace=pace,
        forecast=ends,
        comparison=comparison,
        concerns=(
            *_of_values(history),
            *(_of_stall(here, steps, pace, since_last_s) if lasts else ()),
            *(_of_limit(here, ends) if lasts else ()),
            *_of_pace(pace, comparison),
            *_of_ranks(here, steps),
        ),
    )


def _of_values(history: StepHistory) -> Iterator[Concern]:
    if bad := history.bad:
        norm = "" if bad.grad_norm is None else f", gradient norm {bad.grad_norm:.4g}"
        loss = "unknown" if bad.loss is None else f"{bad.loss:.4g}"
        yield Concern("not_finite", f"step {bad.step} is not finite: loss {loss}{norm}")


def _of_stall(
    here: Circumstances, steps: Sequence[StepNews], pace: Pace | None, since_last_s: float | None
) -> Iterator[Concern]:
    if here.stall:
        yield Concern("stalled", here.stall)
    elif here.state == "running" and pace and since_last_s is not None and steps[-1].step != here.last_step:
        usual = pace.step_time_s.median
        longest = max(step.step_time_s for step in steps[1:] or steps)
        if since_last_s > max(STALLED_STEPS * usual, 2 * longest, LEAST_STALL_S):
            times = since_last_s / usual if usual else math.inf
            yield Concern("stalled", f"no step for {since_last_s:.0f} s, {times:.0f} times the median")


def _of_limit(here: Circumstances, ends: Forecast | None) -> Iterator[Concern]:
    if here.limit_left_s is None or ends is None or not ends.steps_left:
        return
    latest = ends.remaining_s_ci95[1] if ends.remaining_s_ci95 else ends.remaining_s
    earliest = ends.remaining_s_ci95[0] if ends.remaining_s_ci95 else ends.remaining_s
    if earliest > here.limit_left_s:
        # With a limit that has passed, nothing may be left to wait for: the next step is overdue.
        fits = int(ends.steps_left * here.limit_left_s / ends.remaining_s) if here.limit_left_s > 0 else 0
        missing = f"{ends.steps_left - fits} of its steps will be missing"
        yield Concern("time_limit", f"it will not finish within the job's time limit: {missing}")
    elif latest > here.limit_left_s:
        yield Concern("time_limit", "it may not finish within the job's time limit")


def _of_pace(pace: Pace | None, comparison: ForecastComparison | None) -> Iterator[Concern]:
    if comparison and comparison.standing == "slower" and comparison.delta_pct is not None:
        text = f"steps take {comparison.delta_pct:.1f} % longer than expected ({comparison.expected.source})"
        yield Concern("off_expectation", text)
    if pace and pace.before_s:
        slower = 100 * (pace.step_time_s.median / pace.before_s - 1)
        if slower > SLOWED_PCT:
            text = f"steps take {slower:.1f} % longer since step {pace.first_step}: {pace.step_time_s.median:.4g} s"
            yield Concern("slowed_down", f"{text} after {pace.before_s:.4g} s")


def _of_ranks(here: Circumstances, steps: Sequence[StepNews]) -> Iterator[Concern]:
    last = [step.whole for step in steps if step.whole and not step.profiled][-RANK_STEPS:]
    if len(last) < RANK_STEPS:
        return
    evidence = Evidence(step_time_s=last[-1].step_time_s, steps=last, work=here.work, node_of=here.node_of)
    found = slow_rank(evidence)
    if isinstance(found, FoundCause):
        yield Concern("slow_rank", found.evidence[0])

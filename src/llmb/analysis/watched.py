# SPDX-License-Identifier: Apache-2.0
"""What is seen of a run that has not ended, and what gives cause for concern. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmb.analysis.forecast import Expected, Forecast, ForecastComparison, Pace, compare_with, find_pace, forecast
from llmb.runs.steps import StepNews
from llmb.verdict.causes_evidence import Evidence, Work
from llmb.verdict.causes_measured import FoundCause, slow_rank

State = Literal["queued", "starting", "running", "ended"]
Kind = Literal["off_expectation", "slowed_down", "stalled", "not_finite", "slow_rank", "time_limit"]
KEPT_STEPS = 2000
"""How many of the last steps of a long run are looked at."""
STALLED_STEPS, LEAST_STALL_S = 5.0, 10.0
"""No step for so many medians, and seconds, is a stall; a checkpoint may take as long."""
RANK_STEPS = 20
"""A rank is slow if it is so in the last steps."""
SLOWED_PCT = 3.0


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
    unfinished: str | None = None
    """Who has completed fewer collectives than others while no step came."""
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
            text = f"no step for {since_last_s:.0f} s, {times:.0f} times the median"
            yield Concern("stalled", f"{text}; {here.unfinished}" if here.unfinished else text)


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

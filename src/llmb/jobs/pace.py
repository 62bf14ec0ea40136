# SPDX-License-Identifier: Apache-2.0
"""Follows a run: its steps so far, their pace, the remaining time, and the expected pace."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from llmb.base.statistics import Statistics, describe
from llmb.jobs.job import Job
from llmb.launch.jobspec.spec import read_spec
from llmb.launch.programs.port import find_program
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record, seconds_of
from llmb.runs.steps import StepNews
from llmb.verdict.judgement import default_tolerance

State = Literal["queued", "starting", "running", "ended"]
Standing = Literal["too early", "as expected", "slower", "faster"]
PACE_STEPS = 20
"""The number of last steps over which the pace is measured; it is small, so that changes show soon."""
FEWEST_STEPS = 10
"""With fewer steps, the pace is not compared with the expectation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Step times of an attempt's last steps, without profiled steps. The first unprofiled step, which may include
    warm-up, counts only if there is no other."""

    first_step: int
    last_step: int
    step_time_s: Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected step time of a run, with its source and tolerance."""

    step_time_s: float
    source: str
    tolerance_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceComparison:
    """The median step time, compared with the expected time; ``delta_pct`` is positive if slower, None if too early."""

    expected: Expected
    standing: Standing
    delta_pct: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run at ``at_s``, in seconds since 1970. Durations are in seconds."""

    at_s: float
    state: State
    reason: str | None
    nodes: str | None
    attempt: int
    done: int
    total: int
    steps: tuple[StepNews, ...]
    """The most recent steps."""
    since_last_s: float | None
    limit_left_s: float | None
    pace: Pace | None
    remaining_s: float | None
    comparison: PaceComparison | None


def find_pace(steps: Sequence[StepNews]) -> Pace | None:
    """Return the pace of an attempt from its steps in order; None if no unprofiled step has a finite time."""
    counted = [step for step in steps if not step.profiled and math.isfinite(step.step_time_s)]
    last = (counted[1:] or counted)[-PACE_STEPS:]
    if not last:
        return None
    times = describe([step.step_time_s for step in last])
    return Pace(first_step=last[0].step, last_step=last[-1].step, step_time_s=times)


def compare_with(expected: Expected, pace: Pace | None) -> PaceComparison:
    if pace is None or pace.step_time_s.count < FEWEST_STEPS:
        return PaceComparison(expected=expected, standing="too early", delta_pct=None)
    delta = 100 * (pace.step_time_s.median / expected.step_time_s - 1)
    standing: Standing = "as expected" if abs(delta) <= expected.tolerance_pct else "slower" if delta > 0 else "faster"
    return PaceComparison(expected=expected, standing=standing, delta_pct=delta)


def expectation(plan: Plan, given_s: float | None) -> Expected | None:
    """Return the step time ``given_s`` or else the published one, with the tolerance of verdicts; None if there is
    neither."""
    if given_s is not None:
        return Expected(step_time_s=given_s, source="as given", tolerance_pct=default_tolerance("expectation").pct)
    figure = plan.recipe.figure
    if not figure:
        return None
    source, tolerance = f"published, {figure.source} line {figure.line}", default_tolerance("published")
    return Expected(step_time_s=figure.step_time_s, source=source, tolerance_pct=tolerance.pct)


class WatchedRun:
    """Follows a run and keeps its steps. Creating it raises OSError or ValueError if the record cannot be read."""

    def __init__(self, folder: RunFolder, expected_s: float | None) -> None:
        self.folder = folder
        self.record = read_record(folder)
        self.expected = expectation(self.record.plan, expected_s)
        self.new_steps = find_program(self.record.program).new_steps(folder)
        self.steps: list[StepNews] = []
        self.limit_s = _time_limit_s(folder)

    def look(self, job: Job, now_s: float) -> RunView:
        with suppress(OSError, ValueError):  # if the record cannot be read, as on a slow file system, keep the last one
            self.record = read_record(self.folder)
        for step in self.new_steps.new():
            if self.steps and step.step <= self.steps[-1].step:
                self.steps.clear()  # a new attempt
            self.steps.append(step)
        plan, begun = self.record.plan, self.record.attempts[-1] if self.record.attempts else None
        first = begun.first_step if begun else plan.first_step
        pace = find_pace([step for step in self.steps if step.step >= first])
        state, since_last_s = self._state(job), self._since_last_s(now_s)
        started_s = seconds_of(begun.started_at if begun else self.record.started_at)
        remaining_s = None
        if pace and state != "ended":
            left = plan.last_step - self.steps[-1].step
            remaining_s = max(0.0, left * pace.step_time_s.median - (since_last_s or 0.0))
        return RunView(
            at_s=now_s,
            state=state,
            reason=job.reason or self.record.reason,
            nodes=job.nodes or (self.record.job and self.record.job.nodes) or None,
            attempt=max(len(self.record.attempts), 1),
            done=self.steps[-1].step + 1 - plan.first_step if self.steps else 0,
            total=plan.steps,
            steps=tuple(self.steps[-PACE_STEPS:]),
            since_last_s=since_last_s,
            limit_left_s=started_s + self.limit_s - now_s if self.limit_s and started_s and job.live else None,
            pace=pace,
            remaining_s=remaining_s,
            comparison=compare_with(self.expected, pace) if self.expected else None,
        )

    def _state(self, job: Job) -> State:
        if not job.live:
            return "ended"
        return "queued" if job.status == "queued" else "running" if self.steps else "starting"

    def _since_last_s(self, now_s: float) -> float | None:
        try:
            return max(0.0, now_s - self.folder.steps.stat().st_mtime) if self.steps else None
        except OSError:
            return None


def _time_limit_s(folder: RunFolder) -> float | None:
    try:
        spec = read_spec(folder)
    except (OSError, ValueError):
        return None
    return 60 * spec.time_limit_min if spec.time_limit_min else None

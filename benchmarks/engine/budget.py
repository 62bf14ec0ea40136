# SPDX-License-Identifier: Apache-2.0
"""The time budget of a comparison, and the expected duration of a case."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.engine.cases import Case, Subject
from benchmarks.engine.records import CaseResult, Settings
from llmb.catalogue.records import Dtype
from llmb.catalogue.throughput import model_flops

START_UP_S = {True: 90.0, False: 8.0}
"""Estimate of a case's time without its steps: starting Python and torch, and compilation, which a GPU has in any case.
Replaced by an engine's own once it has run."""
KERNELS_S = {True: 15.0, False: 8.0}
"""The same for measuring the kernels of a model in one dtype."""
EXPECTED_MFU = 0.4
"""The same for the speed of steps, as a fraction of the peak (``full``)."""
SLACK, SLACK_S = 2.0, {True: 60.0, False: 300.0}
"""A case is stopped after ``SLACK`` times its expected duration and ``SLACK_S``: one that hangs costs no more. Without
a GPU there may be few cores, which other programs use as well."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures the budget from its creation on."""

    budget_s: float
    began: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.budget_s - (time.monotonic() - self.began))

    def say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.began:5.0f} s] {text}\n")
        sys.stderr.flush()


@dataclass(slots=True)
class Estimates:
    """Expected durations, from what was measured so far. Start-up is an engine's, the speed of steps also a dtype's."""

    settings: Settings
    start_up_s: dict[tuple[str, Dtype], float] = field(default_factory=dict)
    """The longest yet: a model's first case compiles, and a later one finds its kernels compiled."""
    slowdown: dict[tuple[str, Dtype], float] = field(default_factory=dict)
    """The time of a step divided by that at the expected MFU, the largest yet."""
    kernels_s: float | None = None

    @property
    def has_gpu(self) -> bool:
        return self.settings.gpu_type != "cpu"

    def case_s(self, case: Case) -> float:
        """Start-up, and all steps."""
        dtype = case.subject.recipe.dtype
        own = [value for (name, _), value in self.start_up_s.items() if name == case.engine]
        start_up = self.start_up_s.get(
            (case.engine, dtype), max(own, default=START_UP_S[self.has_gpu or self.settings.compiled])
        )
        slowdown = self.slowdown.get((case.engine, dtype), 1.0)
        return start_up + steps_of(case, self.settings) * slowdown * step_s(case.subject)

    def ceilings_s(self, subjects: Sequence[Subject]) -> float:
        return len(subjects) * (self.kernels_s or KERNELS_S[self.has_gpu])

    def limit_s(self, case: Case, left_s: float) -> float:
        return min(left_s, SLACK * self.case_s(case) + SLACK_S[self.has_gpu])

    def learn(self, case: Case, result: CaseResult) -> None:
        if result.status != "done" or result.wall_s is None:
            return
        key, guessed = (case.engine, case.subject.recipe.dtype), step_s(case.subject)
        start_up = result.wall_s
        if guessed:
            measured = median(result.step_times_s)
            start_up = max(1.0, result.wall_s - steps_of(case, self.settings) * measured)
            self.slowdown[key] = max(self.slowdown.get(key, 0.0), measured / guessed)
        self.start_up_s[key] = max(self.start_up_s.get(key, 0.0), start_up)

    def learn_kernels(self, subjects: Sequence[Subject], wall_s: float) -> None:
        self.kernels_s = max(self.kernels_s or 0.0, wall_s / len(subjects))


def steps_of(case: Case, settings: Settings) -> int:
    return settings.warmup_steps + settings.steps + case.settings.profiled_steps


def step_s(subject: Subject) -> float:
    """At the expected MFU; 0 where the device's peak is unknown."""
    recipe = subject.recipe
    if recipe.peak_tflops is None:
        return 0.0
    flops = recipe.layout.gbs * model_flops(recipe.model, recipe.layout.seq_len, causal=False)
    return flops / (EXPECTED_MFU * recipe.peak_tflops * 1e12)


def over_budget(needed_s: float, left_s: float) -> str | None:
    """Why something that takes so long is not started; None if it is expected to end in time."""
    return f"budget: {left_s:.0f} s left, about {needed_s:.0f} s needed" if needed_s > left_s else None

# SPDX-License-Identifier: Apache-2.0
"""The time budget of a comparison, and the expected duration of a case."""

import sys
import time
from dataclasses import dataclass, field

from benchmarks.engine.cases import Case
from benchmarks.engine.records import CaseResult, Settings
from llmb.metrics.flops import model_flops

START_UP_S = {True: 20.0, False: 5.0}
"""Estimate of a case's time without its steps, with a GPU and without, until an engine's first case is measured."""
EXPECTED_MFU = 0.4


@dataclass(frozen=True, slots=True)
class Clock:
    """Measures the budget from its creation on."""

    budget_s: float
    began: float

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.began:5.0f} s] {text}\n")
        sys.stderr.flush()


@dataclass(slots=True)
class Budget:
    """Prevents cases from starting that are not expected to end in time."""

    clock: Clock
    settings: Settings
    start_up_s: dict[str, float] = field(default_factory=dict)
    """The time of an engine's last case without its timed steps."""

    def obstacle(self, case: Case) -> str | None:
        needed, left = self.expected_s(case), max(self.clock.left_s, 0.0)
        return f"budget: {left:.0f} s left, about {needed:.0f} s needed" if needed > left else None

    def expected_s(self, case: Case) -> float:
        """Start-up, and the steps at a modest MFU."""
        recipe = case.subject.recipe
        start_up = self.start_up_s.get(case.engine, START_UP_S[recipe.gpu_type != "cpu"])
        if recipe.peak_tflops is None:
            return start_up
        flops = recipe.layout.gbs * model_flops(recipe.model, recipe.layout.seq_len, causal=False)
        steps = self.settings.warmup_steps + self.settings.steps
        return start_up + steps * flops / (EXPECTED_MFU * recipe.peak_tflops * 1e12)

    def learn(self, result: CaseResult) -> None:
        if result.status == "done" and result.wall_s is not None and result.step_time_s is not None:
            steps = self.settings.warmup_steps + self.settings.steps
            self.start_up_s[result.engine] = max(1.0, result.wall_s - steps * result.step_time_s["median"])

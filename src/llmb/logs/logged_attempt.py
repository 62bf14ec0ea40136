# SPDX-License-Identifier: Apache-2.0
"""Follows the steps of a log and keeps the latest attempt: its window, and how it began and ended."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.logs.step_block import StepBlock
from llmb.logs.step_line import STEP_TIME_FIELD, TFLOPS_FIELD, StepLine
from llmb.metrics.window import resolve_window


def _integers() -> "array[int]":
    return array("q")


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class LoggedAttempt:
    """The latest attempt so far. The columns hold its steps in the window, in order; a value not logged is nan."""

    rule: str
    foreseen_last: int | None = None
    """Number of the run's last step, if it is known before the log is read."""
    continued: bool = False
    """The run loaded a checkpoint before its first step, so its first step may not be number 0."""
    number: int = 0
    """Counts from 1. A step number lower than the one before begins a new attempt."""
    last: int | None = None
    """Number of the run's last step, as declared by the latest line; None before the first step."""
    window: Window | None = None
    """None before the first step, and if the rule does not fit the run."""
    window_last: int | None = None
    """Number of the run's last step that the window was resolved for, as declared by the attempt's first line."""
    first_step: int = 0
    """Number of the run's first step."""
    steps: int = 0
    max_step: int = -1
    loss_first: float = math.nan
    loss_last: float = math.nan
    bad_loss_step: int | None = None
    """The first step with a logged loss that is not finite."""
    bad_loss: float = math.nan
    bad_grad_norm_step: int | None = None
    """The first step with a logged gradient norm that is not finite."""
    step: "array[int]" = field(default_factory=_integers)
    step_time_s: "array[float]" = field(default_factory=_floats)
    tflops_per_gpu: "array[float]" = field(default_factory=_floats)

    def add_lines(self, lines: Iterable[StepLine]) -> None:
        for line in lines:
            if line.step == self.max_step:  # logged by several ranks
                continue
            self._enter(line)
            if self.bad_loss_step is None and line.loss is not None and not math.isfinite(line.loss):
                self.bad_loss_step, self.bad_loss = line.step, line.loss
            if self.bad_grad_norm_step is None and line.grad_norm is not None and not math.isfinite(line.grad_norm):
                self.bad_grad_norm_step = line.step
            if self.window and self.window.first <= line.step <= self.window.last:
                self.step.append(line.step)
                self.step_time_s.append(line.step_time_s)
                self.tflops_per_gpu.append(_or_nan(line.tflops_per_gpu))
            self._leave(line, 1)

    def add_block(self, block: StepBlock) -> bool:
        """Adds the steps of ``block``. Returns False if they have to be added line by line."""
        if block.first.step == self.max_step:
            return False
        self._enter(block.first)
        if not self._add_columns(block):
            return False
        self._leave(block.final, block.count)
        return True

    def _add_columns(self, block: StepBlock) -> bool:
        if not self.window:
            return True
        first, last = max(self.window.first, block.first.step), min(self.window.last, block.final.step)
        if first > last:
            return True
        step_times, tflops = block.column(STEP_TIME_FIELD), block.column(TFLOPS_FIELD)
        if step_times is None or tflops is None:
            return False
        inside = slice(first - block.first.step, last - block.first.step + 1)
        self.step.extend(range(first, last + 1))
        self.step_time_s.frombytes(step_times[inside].tobytes())
        self.tflops_per_gpu.frombytes(tflops[inside].tobytes())
        return True

    def _enter(self, line: StepLine) -> None:
        if line.step < self.max_step or not self.number:
            self._begin(line)
        self.last = line.last

    def _begin(self, line: StepLine) -> None:
        self.number += 1
        self.steps, self.max_step = 0, -1
        self.first_step = line.step if self.continued else 0
        self.loss_first = _or_nan(line.loss)
        self.bad_loss_step, self.bad_loss, self.bad_grad_norm_step = None, math.nan, None
        for column in (self.step, self.step_time_s, self.tflops_per_gpu):
            del column[:]
        self.window_last = line.last if self.foreseen_last is None else self.foreseen_last
        try:
            self.window = resolve_window(self.rule, self.window_last + 1 - self.first_step, self.first_step)
        except UsageError:
            self.window = None

    def _leave(self, line: StepLine, count: int) -> None:
        self.steps += count
        self.max_step = line.step
        self.loss_last = _or_nan(line.loss)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

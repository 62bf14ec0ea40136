# SPDX-License-Identifier: Apache-2.0
"""Follows the steps of a log and keeps the latest attempt, with its window and the work that lines report."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmb.base.errors import UsageError
from llmb.base.statistics import are_between
from llmb.catalogue.records import Window
from llmb.catalogue.window import STEADY, resolve_window
from llmb.readers.anomalies import NO_STEADY_STATE, steady_window
from llmb.readers.contradictions import Lap
from llmb.readers.logs.formats.format import Value
from llmb.readers.logs.step_line import StepLine

GBS, SEQ_LEN, GPUS = "layout.gbs", "layout.seq_len", "layout.gpus"
MOST_APART = 1.1
"""Maximum ratio of two numbers of tokens that count as equal."""


@dataclass(slots=True)
class PrintedWork:
    """The work that the window's lines report, and the first inconsistency."""

    gbs: int | None = None
    """Sequences per step; None if not in the log."""
    change: str | None = None
    """Description of the first difference in the amount of work between steps."""
    before: tuple[int, int] | None = None
    """A step, and the number of samples consumed by the end of that step."""
    work: tuple[float, float] | None = None
    """The smallest and the largest number of tokens per GPU in a step, by its rate and time."""
    tokens: Counter[int] = field(default_factory=Counter)
    """The number of steps by their number of tokens, without padding."""

    def note(self, line: StepLine) -> None:
        """Add the next line of the window."""
        if line.tokens is not None:
            self.tokens[line.tokens] += 1
        self.change = self.change or _ramp(line) or self._other_batch(line) or self._other_work(line)

    def _other_batch(self, line: StepLine) -> str | None:
        consumed = self._consumed(line)
        gbs = line.gbs or consumed
        if gbs is None:
            return None
        if consumed and consumed != gbs:
            note = f"the global batch size is {gbs:g} in step {line.step}"
            return f"{note}, but {consumed:g} samples per step were consumed since the previous line"
        if self.gbs is None and gbs == int(gbs):
            self.gbs = int(gbs)
        if self.gbs == gbs:
            return None
        before = "" if self.gbs is None else f"from {self.gbs} "
        return f"the global batch size changes {before}to {gbs:g} in step {line.step} of the window"

    def _consumed(self, line: StepLine) -> float | None:
        before = self.before
        self.leave(line)
        if before is None or line.samples is None or line.step <= before[0]:
            return None
        return (line.samples - before[1]) / (line.step - before[0])

    def leave(self, line: StepLine) -> None:
        """Note a line, inside or outside the window, for comparison with the next one."""
        if line.samples is not None:
            self.before = line.step, line.samples

    def _other_work(self, line: StepLine) -> str | None:
        if not line.tokens_per_s_per_gpu:
            return None
        work = line.tokens_per_s_per_gpu * line.step_time_s
        least, most = self.work or (work, work)
        self.work = min(least, work), max(most, work)
        if self.work[1] <= MOST_APART * self.work[0]:
            return None
        note = f"according to its rate and time, step {line.step} has {work:,.0f} tokens per GPU"
        return f"{note}, but another step of the window has {least if work > least else most:,.0f}"

    def flaw(self, configuration: Mapping[str, Value]) -> str | None:
        """Describe how the work in the lines varies or differs from the configuration; None if it does neither."""
        gbs, length, gpus = (_count(configuration, key) for key in (GBS, SEQ_LEN, GPUS))
        if self.change:
            return self.change
        if self.gbs and gbs and self.gbs != gbs:
            return f"the global batch size is {self.gbs} in the log's lines, but {gbs} in its name or arguments"
        places = gbs * length if gbs and length else None
        most = max(self.tokens, default=0)
        if places and most > places:
            return f"a step has {most:,} tokens, but the layout has {places:,}"
        if places and gpus and self.work and not 1 / MOST_APART < self.work[0] * gpus / places < MOST_APART:
            note = f"according to its rate and time, a step has {self.work[0]:,.0f} tokens per GPU"
            return f"{note}, but according to the layout {places / gpus:,.0f}"
        return self._other_tokens()

    def _other_tokens(self) -> str | None:
        if not self.tokens:
            return None
        usual, count = self.tokens.most_common(1)[0]
        other = next((one for one in self.tokens if not 1 / MOST_APART < one / usual < MOST_APART), None)
        if other is None or 2 * count <= self.tokens.total():
            return None
        return f"a step of the window has {other:,} tokens, but most have {usual:,}"


def _ramp(line: StepLine) -> str | None:
    return f"the global batch size is ramped up in step {line.step} of the window" if line.ramped_up else None


def _count(configuration: Mapping[str, Value], key: str) -> int | None:
    value = configuration.get(key)
    return value if isinstance(value, int) else None


RELATIVE_RULES = ("reference",)
"""Window rules that count a run's steps from 0; other rules use the step numbers in the log."""
_MOST_LAG = 8
"""Maximum number of lines by which ranks that log the same steps lag behind each other."""
_MOST_RANKS = 1 << 16
_MOST_GAPS = 64
_UNKNOWN = 1 << 62
_ONE = array("q", [1])
_UNTOLD = array("d", [0.0])


def _integers() -> "array[int]":
    return array("q")


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class LoggedAttempt:
    """The latest attempt so far.

    Columns hold its steps in the window, in order; unlogged ``tflops_per_gpu`` are nan.
    """

    rule: str
    foreseen_last: int | None = None
    """Number of the run's last step, if known from an earlier pass over the log."""
    documented: str | None = None
    """The window of the log's document, if known."""
    first_number: int = 0
    """Number of the first step of a run that does not resume."""
    means: bool = False
    """True if a line that declares no number of averaged steps covers all steps since the previous line."""
    continued: bool = False
    """True if the run loaded a checkpoint before its first step, whose number may then not be ``first_number``."""
    number: int = 0
    """Number of the attempt, from 1; 0 before the first step."""
    last: int | None = None
    """Number of the run's last step, as declared by the latest line; None before the first step."""
    window: Window | None = None
    """The steps to measure; None before the first step, and if the rule does not fit the run."""
    window_last: int | None = None
    """Number of the last step for which ``window`` was resolved."""
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
    skipped_in_window: int = 0
    """Number of steps with a skipped update, according to the window's lines."""
    mean_of: int = 1
    """The largest number of averaged steps that a line declares."""
    clock_s: float = 0.0
    """The coarsest resolution of the clock from which step times are derived; see ``StepLine``."""
    work: PrintedWork = field(default_factory=PrintedWork)
    """The work of a step according to the lines of the window."""
    profiled: tuple[int, int] | None = None
    """The first and the last step in which a profiler started or ended."""
    untimed: set[int] = field(default_factory=set)
    """Numbers of steps in the window without a time, because of a profiler."""
    step: "array[int]" = field(default_factory=_integers)
    laps: list[Lap] = field(default_factory=list)
    """The intervals from the previous line to each line of the window, if both have timestamps."""
    logged: tuple[int, float] | None = None
    """Step and timestamp of the last line; None if the line has no timestamp."""
    logged_s: "array[float]" = field(default_factory=_floats)
    """Timestamps of the window's lines; 0 for a line without one, shorter if the last lines have none."""
    since: "array[int]" = field(default_factory=_integers)
    """The number of steps that each line of the window covers; lines without an entry cover 1."""
    step_time_s: "array[float]" = field(default_factory=_floats)
    tflops_per_gpu: "array[float]" = field(default_factory=_floats)
    gaps: dict[int, int] = field(default_factory=dict)
    """The number of occurrences of each distance between logged steps, by distance."""
    ranks: dict[int | None, int] = field(default_factory=dict)
    """The last step logged by each rank."""
    left_out: str | None = None
    """``StepLine.left_out`` of the last line that has it."""
    contradiction: str | None = None
    """``StepLine.contradiction`` of the last line that has it."""
    logged_last_s: float | None = None
    """The timestamp of the last line, in the window or not."""
    repeated_s: tuple[float, float] = (0.0, 0.0)
    """Sums of the times of steps that were logged again: as logged first, and as logged again."""
    settled: bool = False
    """True if ``settle`` determined the steady state, ``window``, which is None if there is none."""

    @property
    def interval(self) -> int:
        """The most frequent distance between logged steps; 1 if it is not regular, ``mean_of`` if ``gaps`` is empty."""
        if not self.gaps:
            return self.mean_of
        gap, count = max(self.gaps.items(), key=lambda item: item[1])
        done = self.max_step - self.first_number + 1
        is_regular = 2 * count > sum(self.gaps.values()) and (count > 1 or done % gap == 0)
        return gap if is_regular else 1

    @property
    def weights(self) -> Sequence[int] | None:
        """The number of steps covered by each of the window's lines; None if each covers one."""
        most = self.interval if self.mean_of == 1 else self.mean_of
        weights = [min(count, most) for count in self.since]
        return [*weights, *[1] * (len(self.step) - len(weights))] if max(weights, default=1) > 1 else None

    @property
    def finished(self) -> bool:
        """True if the last step was done; with an interval, the last line may be for an earlier step."""
        return self.last is not None and self.max_step > self.last - self.interval

    def resolve_window(self, last: int) -> Window:
        """Return the window of a run whose last step is ``last``. Raise UsageError if the rule does not fit."""
        steps = max(1, last + 1 - self.first_step)
        if self.rule == STEADY:
            if self.settled and self.window is None:
                raise UsageError(NO_STEADY_STATE)
            return self.window if self.settled and self.window else resolve_window("all", steps, self.first_step)
        if self.rule not in RELATIVE_RULES:
            return resolve_window(self.rule, steps, self.first_step)
        before = max(0, self.first_step - self.first_number)  # a damaged line may have a number below the first
        window = resolve_window(self.rule, steps, before, self.documented)
        if window.first >= self.first_step:
            return window
        return Window(first=self.first_step, last=max(window.last, self.first_step), rule=window.rule)

    def settle(self) -> None:
        """Keep only the steady state if the rule is ``auto`` and times are finite. Call this after the last step."""
        if self.rule != STEADY or not are_between(-math.inf, self.step_time_s, math.inf):
            return
        self.settled = True
        steady = steady_window(self.step_time_s[1:], 1)  # the first step of an attempt includes warm-up
        for column in self._columns:
            del column[steady.last + 1 if steady else 0 :]
            del column[: steady.first if steady else 0]
        self.window = Window(first=self.step[0], last=self.step[-1], rule=STEADY) if steady else None

    @property
    def _columns(self) -> "tuple[array[int] | array[float], ...]":
        return self.step, self.since, self.step_time_s, self.tflops_per_gpu, self.logged_s

    def missing(self, window: Window) -> list[range]:
        """Return the ranges of steps in the window that the log lacks, apart from steps that it regularly skips."""
        if self.mean_of > 1:
            return []  # each line declares the steps that it covers
        every = self.interval
        first = window.first + -(window.first - self.first_number + 1) % every
        expected = range(first, window.last + 1, every)
        if len(self.step) + len(self.untimed) >= len(expected):
            return []
        numbers = (first - every, *sorted({*self.step, *self.untimed}), first + every * len(expected))
        return [range(before + every, after, every) for before, after in pairwise(numbers) if after > before + every]

    def add_lines(self, lines: Iterable[StepLine]) -> None:
        for line in lines:
            if not self._is_news(line):
                if self.step and line.step == self.step[-1]:
                    first, again = self.repeated_s
                    self.repeated_s = first + self.step_time_s[-1], again + line.step_time_s
                continue
            if line.step <= self.max_step or not self.number or line.after is not None:
                self._begin(line)
            self.last = line.last
            if self.bad_loss_step is None and line.loss is not None and not math.isfinite(line.loss):
                self.bad_loss_step, self.bad_loss = line.step, line.loss
            if self.bad_grad_norm_step is None and line.grad_norm is not None and not math.isfinite(line.grad_norm):
                self.bad_grad_norm_step = line.step
            if line.profiled:
                self.profiled = (self.profiled or (line.step, 0))[0], line.step
            if self.window and self.window.first <= line.step <= self.window.last:
                self._add_to_window(line)
            self.logged_last_s = line.logged_s
            self.left_out = line.left_out or self.left_out
            self.contradiction = line.contradiction or self.contradiction
            self.logged = None if line.logged_s is None else (line.step, line.logged_s)
            self.mean_of = max(self.mean_of, line.mean_of)
            self.clock_s = max(self.clock_s, line.clock_s)
            self._leave(line)

    def _add_to_window(self, line: StepLine) -> None:
        self.work.note(line)
        self.skipped_in_window += line.skipped
        if line.profiled:
            self.untimed.add(line.step)
            return
        self._note_lap(line)
        steps = self._steps_of(line)
        if steps != 1:
            self.since.extend(_ONE * (len(self.step) - len(self.since)))
            self.since.append(steps)
        if line.logged_s:
            self.logged_s.extend(_UNTOLD * (len(self.step) - len(self.logged_s)))
            self.logged_s.append(line.logged_s)
        self.step.append(line.step)
        self.step_time_s.append(line.step_time_s)
        self.tflops_per_gpu.append(_or_nan(line.tflops_per_gpu))

    def _steps_of(self, line: StepLine) -> int:
        if line.after is not None:
            return line.step - line.after
        if line.mean_of > 1 or not self.means:
            return line.mean_of
        if self.steps:
            return line.step - self.max_step
        return _UNKNOWN if self.continued else line.step - self.first_number + 1

    def _note_lap(self, line: StepLine) -> None:
        if line.logged_s is not None and self.logged and self.logged[0] < line.step:
            step, logged_s = self.logged
            steps = line.step - step if self.means else 1
            steps_s, clock_s = line.step_time_s * steps, line.logged_s - logged_s
            # The time of an evaluation is not logged: all excess time of the lap may be between its steps.
            between_s = max(0.0, clock_s - steps_s) if line.interrupted else 0.0
            self.laps.append(Lap(steps_s=steps_s, clock_s=clock_s, between_s=between_s, steps=steps))

    def _is_news(self, line: StepLine) -> bool:
        before = self.ranks.get(line.rank)
        if len(self.ranks) < _MOST_RANKS or before is not None:
            self.ranks[line.rank] = line.step
        if not self.number or line.step > self.max_step or line.after is not None:
            return True
        return line.step < (self.max_step - _MOST_LAG * max(self.gaps, default=1) if before is None else before)

    def _begin(self, line: StepLine) -> None:
        self.number += 1
        self.steps, self.max_step = 0, -1
        if line.after is not None:
            self.continued = line.after >= self.first_number
        begun = line.step if line.after is None else line.after + 1
        self.first_step = begun if self.continued else min(line.step, self.first_number)
        self.loss_first = _or_nan(line.loss)
        self.bad_loss_step, self.bad_loss, self.bad_grad_norm_step = None, math.nan, None
        self.skipped_in_window, self.mean_of, self.clock_s = 0, 1, 0.0
        self.left_out, self.contradiction = None, None
        self.gaps, self.ranks = {}, {line.rank: line.step}
        self.laps, self.logged, self.repeated_s = [], None, (0.0, 0.0)
        self.work, self.profiled, self.untimed = PrintedWork(), None, set()
        for column in self._columns:
            del column[:]
        self.window_last = line.last if self.foreseen_last is None else self.foreseen_last
        try:
            self.window = self.resolve_window(self.window_last)
        except UsageError:
            self.window = None

    def _leave(self, line: StepLine) -> None:
        if self.steps:
            self._note_gap(line.step - self.max_step)
        self.steps += 1
        self.max_step = line.step
        self.work.leave(line)
        self.loss_last = _or_nan(line.loss)

    def _note_gap(self, gap: int) -> None:
        if gap > 1 and self.steps == 1 and self.max_step == self.first_number:
            return  # some programs, such as Megatron-LM, log the first step whatever the interval
        if gap in self.gaps or len(self.gaps) < _MOST_GAPS:
            self.gaps[gap] = self.gaps.get(gap, 0) + 1


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value

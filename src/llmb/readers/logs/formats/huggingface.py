# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer (transformers 4.30 to 5.0, ``trainer.py``, ``trainer_callback.py`` and tqdm).

Every ``logging_steps`` steps ``{'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 4.5e-05, 'epoch': 0.1}`` is logged,
without a step number or a time (transformers 5 quotes the values). The progress bar, ``10%|# | 5/50 [01:02<09:18,
12.41s/it]``, has both; the last line is ``{'train_runtime': 614.2, ...}``. The bar counts steps from 1 and is printed
at most every 0.1 s. A step's time is the mean since the previous bar, by the bar's clock, which shows whole
seconds. An evaluation has its own bar, perhaps of the same length, and ends with ``{'eval_loss': .., 'eval_runtime':
32.1, ..}``; step times exclude it. If the bar is disabled or in another file, the last step has the mean step time of
the whole run.
"""

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from llmb.base.errors import UsageError
from llmb.readers.logs.formats.format import LINE_ENDS_SOON, NUMBER, Format, number_or_none
from llmb.readers.logs.step_line import StepLine

_BAR = (
    rb"(?:(?<=[\r\n])|(?<=\d: )|\A) {0,9}\d{1,3}%\|[^|\r\n]{0,200}\| (?P<done>\d{1,9})/(?P<total>\d{1,9})"
    rb" \[(?P<clock>(?:\d{1,5}:)?\d\d:\d\d)<[^\],\r\n]{0,40}"
    rb"(?:, {1,9}(?P<rate>\d{1,9}(?:\.\d{1,9})?)(?P<unit>s/it|it/s))?[^\]\r\n]{0,60}\]"
)
_VALUES = rb"\{'loss': [^{}\r\n]{1,600}'learning_rate': [^{}\r\n]{1,600}\}"
_END = rb"\{'train_runtime': [^{}\r\n]{1,600}\}"
_EVALUATION = (
    rb"'(?:eval|test)\w{0,60}_runtime': '?(?P<evaluation>%s)'?,(?:[^{}\r\n]{0,600}?(?P<during>'epoch': ))?" % NUMBER
)
_HEADER = (
    rb"Total optimization steps = (?P<steps>\d[\d,]{0,11})(?=[\r\n])"
    rb"|(?:from|and) global step (?P<from>\d{1,9})(?=[\r\n])"
)
_ANY = re.compile(
    rb"(?:%s|(?P<values>%s)|(?P<end>%s)|%s|%s)" % (_BAR, _VALUES, _END, _EVALUATION, _HEADER) + LINE_ENDS_SOON
)
STEP = re.compile(rb"(?:%s|%s)" % (_VALUES, _END) + LINE_ENDS_SOON)
_FIELD = rb"'%s': '?(%s)'?[,}]"
_LOSS, _TRAIN_LOSS, _GRAD_NORM, _RUNTIME, _RATE = (
    re.compile(_FIELD % (name, NUMBER))
    for name in (b"loss", b"train_loss", b"grad_norm", b"train_runtime", b"train_steps_per_second")
)
_EPOCH = re.compile(_FIELD % (b"epoch", NUMBER))
_RATE_ERROR = 0.0005
"""Error of ``train_steps_per_second``, which has three decimals."""
_DIGITS_ERROR = 0.001
"""Relative error of the product of two four-digit numbers, as printed by transformers 5."""
_CLOCK_S = 1.0
_MOST_TOTALS = 20
_MOST_PENDING = 10_000
_DAMAGED = 1e9
"""Upper limit of the seconds of a run, and of its steps per second; larger values are considered damaged."""
_ALIKE = 2.0
"""Maximum ratio of two measurements of one run's step time, one of which may include work before, between and after
steps."""
_ALIKE_PACES = 1.25
"""Maximum ratio of the mean step times of two parts of a run without a pause or a slow step."""
_ALIKE_RATES = 3.0
"""Maximum ratio of the step times by the bar's rate, in which the first step may count twice, and by its clock."""


class _State(NamedTuple):
    done: int
    clock_s: int
    step_s: float | None
    """The step time by the bar's own rate."""


class HuggingFaceReader:
    """Follows the progress bar of training. Output to a file is buffered, but bars are not: logged values may be
    printed much later than their step's bar, even after the bars of the next run, or before all bars."""

    def __init__(self) -> None:
        self.bar = _Bar()
        self.other: _Bar | None = None
        """A bar of the same length that began during the previous one: of an evaluation, or of the next run."""
        self.held: list[StepLine] = []
        """The steps of ``other``."""
        self.other_totals: set[int] = set()
        """Lengths of bars that belong to an evaluation, or to another run."""
        self.epochs: list[float] = []
        """The first two epochs that the run logged."""
        self.values = b""
        """The last logged values, until they are added to a step."""
        self.evaluations_s = 0.0
        """The time of evaluations in this run, as logged."""
        self.whole: StepLine | None = None
        """The mean step of a run whose end was logged before any of its bars."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in _ANY.finditer(text, start, end):
            yield from self._see(match)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = [*self.find(text), *self._conclude()]
        return steps, False

    def _see(self, match: "re.Match[bytes]") -> Iterator[StepLine]:
        if match["done"]:
            state = _State(int(match["done"]), _seconds(match["clock"]), _step_s(match["rate"], match["unit"]))
            yield from self._see_bar(state, int(match["total"]))
        elif match["values"]:
            if len(self.epochs) < 2 and (epoch := _EPOCH.search(match["values"])):
                self.epochs.append(float(epoch[1]))
            self.values = match["values"]
            if not self.other:
                self._log_values()
        elif match["evaluation"]:
            self._see_evaluation(float(match["evaluation"]), during=match["during"] is not None)
        elif match["end"]:
            yield from self._see_end(match["end"])
        elif match["steps"]:
            yield from self._conclude()
            self.bar = _Bar(int(match["steps"].replace(b",", b"")), is_logged=True)
        else:
            self.bar.start, self.bar.is_logged = int(match["from"]), True

    def _log_values(self) -> None:
        if not self.bar.whole or self.bar.is_complete:
            self.values = self.bar.log(self.values)

    def _conclude(self) -> Iterator[StepLine]:
        """Yield the remaining steps. A bar without a sign of an evaluation belongs to training."""
        if self.whole:
            yield self.whole
            self.whole = None
        yield from self._adopt()
        yield from self.bar.release()

    def _adopt(self) -> Iterator[StepLine]:
        """Use the other bar as the bar of training, unless it belonged to an evaluation; yield the steps of both."""
        if self.other and not self.other.is_over:
            yield from self.bar.release()
            yield from self.held
            self.bar = self.other
            self._log_values()
        self.other, self.held = None, []

    def _see_bar(self, state: _State, total: int) -> Iterator[StepLine]:
        if self.whole:
            if total != self.whole.last:
                return  # of an evaluation
            self.bar.whole, self.whole = self.whole, None
        self.bar.total = self.bar.total or total
        if total != self.bar.total:
            if len(self.other_totals) < _MOST_TOTALS:
                self.other_totals.add(total)
            (self.other or self.bar).pauses.see_bar(state.done, state.clock_s)
        elif self.other and not self._is_continued(state, self.other):
            yield from self._see_other(state, self.other)
        elif not self.other and self.bar.seen and (state.done < self.bar.done or state.clock_s < self.bar.clock_s):
            if not self.bar.pauses.is_past(state.done, state.clock_s):
                self.other = _Bar(total)
                self.held += self.other.move(state)
        else:
            if self.other:
                self.bar.pauses.see_bar(self.other.done, self.other.clock_s)
            self.other, self.held = None, []
            yield from self.bar.move(state)
            self._log_values()

    def _is_continued(self, state: _State, other: "_Bar") -> bool:
        """Return whether ``state`` continues the bar that preceded ``other``, with a clock that kept running."""
        follows = state.done >= self.bar.done and state.clock_s >= self.bar.clock_s + other.clock_s - _CLOCK_S
        return follows and (state.done < other.done or state.done == self.bar.done or other.is_complete)

    def _see_other(self, state: _State, other: "_Bar") -> Iterator[StepLine]:
        if state.done < other.done or state.clock_s < other.clock_s:
            yield from self._adopt()
            self.other = other = _Bar(other.total)
        elif state.done > other.done:
            other.is_over = False
        self.held += other.move(state)
        if len(self.held) > _MOST_PENDING:
            yield from self._adopt()

    def _see_evaluation(self, seconds: float, *, during: bool) -> None:
        if not 0 < seconds < _DAMAGED:
            return
        self.evaluations_s += seconds if during else 0.0
        if not self.other or self.other.pauses.is_open:
            (self.other or self.bar).pauses.see_end(seconds)
        elif self.other.clock_s <= seconds + _CLOCK_S:
            self.other.is_over = True
            self.bar.pauses.see_bar(self.other.done, self.other.clock_s)
            self.bar.pauses.see_end(seconds)

    def _see_end(self, text: bytes) -> Iterator[StepLine]:
        """Yield a run's last step at its last line; yield or keep its mean if it has no timed step, and began at 0."""
        runtime, rate, loss = _RUNTIME.search(text), _RATE.search(text), _TRAIN_LOSS.search(text)
        seconds, per_s = number_or_none(runtime and runtime[1]) or 0.0, number_or_none(rate and rate[1]) or 0.0
        epochs, self.epochs = self.epochs, []
        evaluations_s, self.evaluations_s = self.evaluations_s, 0.0
        if self.whole:
            yield self.whole
            self.whole = None
        yield from self._settle(seconds)
        if not 0 < seconds < _DAMAGED or not 0 <= per_s < _DAMAGED:
            yield from self.bar.release()
            return
        if self.bar.total and self.bar.seen and per_s:
            self._check_bar(self.bar.total, seconds, per_s)
        steps = self.bar.steps_in(seconds, per_s)
        evaluations_s = evaluations_s if evaluations_s < seconds else 0.0
        self.bar.compare(seconds - evaluations_s)
        yield from self.bar.release()
        # Lines are logged at regular epochs: if the first one is late, others were logged before the run resumed.
        resumed = len(epochs) == 2 and epochs[0] > 1.5 * (epochs[1] - epochs[0]) > 0 and not self.bar.start
        if not self.bar.timed and steps > 0 and not resumed:
            last, mean_s = self.bar.total or steps, (seconds - evaluations_s) / steps
            loss_value, left_out = number_or_none(loss and loss[1]), _evaluations_text(evaluations_s)
            whole = StepLine(last, last, mean_s, loss_value, None)
            whole = whole._replace(mean_of=steps, after=last - steps, left_out=left_out)
            if self.bar.seen:
                yield whole
            else:
                self.whole = whole

    def _settle(self, runtime_s: float) -> Iterator[StepLine]:
        """Choose which of two bars belongs to the run that ended, and add the logged values to it."""
        if self.other and not self.other.is_over:
            ended = [bar for bar in (self.bar, self.other) if bar.is_complete and not bar.is_ended]
            fitting = [bar for bar in ended if bar.clock_s <= 1.1 * runtime_s + 2 * _CLOCK_S]
            if min(fitting, key=lambda bar: abs(bar.clock_s - runtime_s), default=self.other) is self.other:
                yield from self._adopt()
        self._log_values()
        self.bar.is_ended = True

    def _check_bar(self, total: int, seconds: float, per_s: float) -> None:
        """Raise UsageError if the bar may belong to another run than the one that ended; note other mismatches."""
        steps, error = seconds * per_s, _steps_error(seconds, per_s)
        if self.bar.done - self.bar.anchor - error <= steps <= total + error:
            return
        if not self.other_totals:
            self.bar.contradiction = f"{total} steps by the progress bar, {steps:.0f} by the runtime and its rate"
            return
        totals = ", ".join(map(str, sorted({total, *self.other_totals})))
        raise UsageError(
            f"the log has progress bars of {totals} steps, but a training run of {steps:.0f} steps ended: it is"
            " unknown which bar belongs to that run",
            do="write the log of each training run to a separate file",
        )


class _Bar:
    def __init__(self, total: int | None = None, *, is_logged: bool = False) -> None:
        self.total = total
        self.start = 0
        """The step that the run resumes from, if it is in the log."""
        self.is_logged = is_logged
        """True if the log shows whether the run resumes."""
        self.anchor = 0
        """The step from which steps are timed."""
        self.done = 0
        self.clock_s = 0
        """The elapsed time that the bar last showed."""
        self.seen = False
        self.timed = False
        """True if a step was timed."""
        self.is_ended = False
        """True if the run logged its end."""
        self.is_over = False
        """True if this was the bar of a completed evaluation."""
        self.whole: StepLine | None = None
        """The mean step of the run, if it was logged before all bars."""
        self.pauses = _Pauses()
        self.steps_s = 0.0
        """Sum of the step times."""
        self.rated_s = 0.0
        """Sum of the step times according to the bar's own rate."""
        self.contradiction: str | None = None
        self.pending: StepLine | None = None
        """The step of the last bar, which may be printed again with logged values."""
        self.is_leap = False
        """True if ``pending`` covers all steps from 0, or one step of a resumed run: the next bar decides which."""

    @property
    def is_complete(self) -> bool:
        return self.seen and self.done == self.total

    def move(self, state: _State) -> Iterator[StepLine]:
        """Advance the bar to ``state``, and yield steps that are now complete. Bars begin at 0 even in resumed runs: if
        the first bar leaps within a second, the run resumed or is fast, and only later steps are timed."""
        if self.seen and state.done == self.done:
            return
        steps, seconds = state.done - self.done, float(state.clock_s - self.clock_s)
        seconds -= self.pauses.take(seconds)
        if self.is_leap:
            self._decide(steps, seconds)
        yield from self.release()
        leaps = self.done == 0 and state.done != self.start + 1
        if not self.seen or (leaps and state.clock_s == self.clock_s):
            self.anchor = state.done
        else:
            before = self.done or (self.start if self.start < state.done else state.done - 1)
            if not self.timed:
                self.anchor = before
            self._time(state, before, max(0.0, seconds))
            self.is_leap = leaps and not self.is_logged
        self.seen, self.done, self.clock_s = True, state.done, state.clock_s
        if self.whole and self.is_complete:
            self.compare(self.whole.step_time_s * self.whole.mean_of)

    def _time(self, state: _State, before: int, seconds: float) -> None:
        steps = state.done - before
        self.steps_s += seconds
        self.rated_s += steps * state.step_s if state.step_s else 0.0
        self.pending = StepLine(
            step=state.done,
            last=self.total or state.done,
            step_time_s=seconds / steps,
            loss=None,
            tflops_per_gpu=None,
            mean_of=steps,
            clock_s=_CLOCK_S * (1 + self.pauses.guessed),
            after=None if self.timed else before,
            left_out=_evaluations_text(self.pauses.pause_s),
            contradiction=self.contradiction,
        )

    def _decide(self, next_steps: int, next_s: float) -> None:
        """Decide, from the next bar, whether the first bar that moved covers all steps before it, or only one step of a
        resumed run. If this remains unclear, its steps are not timed."""
        self.is_leap = False
        if not self.pending:
            return
        seconds = self.pending.step_time_s * self.pending.mean_of
        candidates, factor = ((self.pending.mean_of, 1), _ALIKE_PACES) if next_steps > 1 else ((1,), _ALIKE)
        shares = [(steps, steps / next_steps) for steps in candidates]
        fits = [steps for steps, share in shares if _are_alike(seconds, share * next_s, (1 + share) * _CLOCK_S, factor)]
        self.anchor = self.pending.step - (fits[0] if len(fits) == 1 else 0)
        mean_of = self.pending.step - self.anchor
        if mean_of:
            self.pending = self.pending._replace(mean_of=mean_of, step_time_s=seconds / mean_of, after=self.anchor)
        else:
            self.pending, self.steps_s, self.rated_s = None, 0.0, 0.0

    def log(self, values: bytes) -> bytes:
        """Add logged values to the pending step; return the values if no step is pending, else empty bytes."""
        if not self.pending or not values:
            return values
        loss, grad_norm = _LOSS.search(values), _GRAD_NORM.search(values)
        self.pending = self.pending._replace(
            loss=number_or_none(loss and loss[1]), grad_norm=number_or_none(grad_norm and grad_norm[1])
        )
        return b""

    def release(self) -> Iterator[StepLine]:
        if self.pending and not self.is_leap:
            self.timed = True
            yield self.pending
            self.pending = None

    def compare(self, runtime_s: float) -> None:
        """Note a contradiction if the runtime of all steps, or the bar's own rate, does not match the step times."""
        steps = self.done - self.anchor
        if not self.pending or self.is_leap or not self.is_complete or steps <= 0:
            return
        by_clock, by_runtime, error_s = self.steps_s / steps, runtime_s / steps, 2 * _CLOCK_S / steps
        if by_clock > _ALIKE * by_runtime + error_s or (not self.anchor and by_runtime > _ALIKE * by_clock + error_s):
            self.contradiction = f"{by_clock:.4g} s per step by the progress bar, {by_runtime:.4g} s by the runtime"
        by_rate, shown_s = self.rated_s / steps, (self.steps_s + self.pauses.pause_s) / steps
        if self.rated_s and not self.anchor and not _are_alike(by_rate, shown_s, error_s, _ALIKE_RATES):
            self.contradiction = f"{shown_s:.4g} s per step by the progress bar's clock, {by_rate:.4g} s by its rate"
        self.pending = self.pending._replace(contradiction=self.contradiction)

    def steps_in(self, seconds: float, per_s: float) -> int:
        """Return the number of steps of a completed run, from the bar unless the rate contradicts it; 0 if unknown.
        Since transformers 5, the rate excludes steps before the run resumed."""
        whole = (self.total or 0) - self.start
        error = _steps_error(seconds, per_s)
        if whole > 0 and (
            not per_s or min(abs(seconds * per_s - steps) for steps in (whole, self.total or 0)) <= error
        ):
            return whole
        return _steps_by_rate(seconds, per_s)


class _Pauses:
    """The time of evaluations between two bars of training, from the evaluations' own bars and their logged runtimes.
    Unbuffered output has both; a runtime without a bar since the last bar of training is ignored."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        """The time of evaluations since the last bar of training."""
        self.clock_s = 0
        self.is_open = False
        """True while the bar of an evaluation is shown."""
        self.past_s = 0.0
        """The latest time that the last evaluation's bar can show."""
        self.guessed = 0
        """Number of evaluations with a time known only from the bar's clock, which shows whole seconds."""
        self.pause_s = 0.0
        """The total time excluded from step times."""

    def is_past(self, done: int, clock_s: int) -> bool:
        """Return whether the bar of a completed evaluation was printed again."""
        return not self.is_open and done > 0 and clock_s <= self.past_s

    def see_bar(self, done: int, clock_s: int) -> None:
        if self.is_past(done, clock_s):
            return
        if self.is_open and clock_s < self.clock_s:
            self._guess()
        self.clock_s, self.is_open = clock_s, True

    def see_end(self, seconds: float) -> None:
        if self.is_open:
            self._end(max(seconds, self.clock_s))

    def take(self, between_s: float) -> float:
        """Return the part of the time between two bars that was not spent on steps."""
        if self.is_open:
            self._guess()
        pause_s = min(self.sum_s, between_s) if self.sum_s <= between_s + _CLOCK_S else 0.0
        self.sum_s = 0.0
        self.pause_s += pause_s
        return pause_s

    def _guess(self) -> None:
        self.guessed += self.clock_s > 0
        self._end(self.clock_s)

    def _end(self, seconds: float) -> None:
        self.sum_s += seconds
        self.past_s = seconds + _CLOCK_S
        self.is_open = False


def _evaluations_text(seconds: float) -> str | None:
    return f"without {seconds:.4g} s of evaluation" if seconds else None


def _are_alike(first_s: float, second_s: float, error_s: float, factor: float = _ALIKE) -> bool:
    return first_s <= factor * second_s + error_s and second_s <= factor * first_s + error_s


def _steps_error(seconds: float, per_s: float) -> float:
    """Return the maximum error, in steps, of the product of a rounded runtime and a rounded rate."""
    return 1 + seconds * (_RATE_ERROR + _DIGITS_ERROR * per_s)


def _steps_by_rate(seconds: float, steps_per_s: float) -> int:
    """Compute the number of steps from the rate; return 0 if it is inexact and the rate is rounded by over 0.2 %."""
    is_exact = seconds * _RATE_ERROR < 0.5
    return round(seconds * steps_per_s) if is_exact or steps_per_s >= _RATE_ERROR / 0.002 else 0


def _seconds(clock: bytes) -> int:
    total = 0
    for part in clock.split(b":"):
        total = 60 * total + int(part)
    return total


def _step_s(rate: bytes | None, unit: bytes) -> float | None:
    value = float(rate) if rate else 0.0
    if not value:
        return None
    return value if unit == b"s/it" else 1 / value


FORMAT = Format(
    name="huggingface",
    title="Hugging Face Trainer",
    marks=(
        *(b"'learning_rate': ", b"'train_runtime': ", b"%|", b"_runtime': "),
        *(b"Total optimization steps = ", b" global step "),
    ),
    step=STEP,
    reader=HuggingFaceReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(rb"(?:Continuing training from|checkpoint with epoch \d{1,9} and) global step [1-9]"),
    step_marks=2,
)

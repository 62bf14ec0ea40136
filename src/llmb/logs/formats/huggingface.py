# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer (transformers 4.30 to 5.0, ``trainer.py``, ``trainer_callback.py`` and tqdm).

Every ``logging_steps`` steps ``{'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 4.5e-05, 'epoch': 0.1}``, without
a step number or a time (transformers 5 quotes the values); around it the progress bar, ``10%|# | 5/50 [01:02<09:18,
12.41s/it]``, with both; at the end ``{'train_runtime': 614.2, ...}``. A step is counted from 1, by the bar, which is
printed at most every 0.1 s; its time is the mean since the bar before, by the bar's clock, which shows whole seconds.
Where the bar is off or in another file, only the mean of the whole run is known: it is the time of the last step.
"""

import re
import sys
from collections.abc import Iterator

from llmb.errors import UsageError
from llmb.logs.formats.format import LINE_ENDS_SOON, NUMBER, Format, number_or_none
from llmb.logs.step_line import StepLine

_BAR = (
    rb"(?:(?<=[\r\n])|(?<=\d: )|\A) {0,9}\d{1,3}%\|[^|\r\n]{0,200}\| (?P<done>\d{1,9})/(?P<total>\d{1,9})"
    rb" \[(?P<clock>(?:\d{1,5}:)?\d\d:\d\d)<[^\]\r\n]{0,80}\]"
)
_VALUES = rb"\{'loss': [^{}\r\n]{1,600}'learning_rate': [^{}\r\n]{1,600}\}"
_END = rb"\{'train_runtime': [^{}\r\n]{1,600}\}"
_HEADER = (
    rb"Total optimization steps = (?P<steps>\d[\d,]{0,11})(?=[\r\n])"
    rb"|(?:from|and) global step (?P<from>\d{1,9})(?=[\r\n])"
)
_ANY = re.compile(rb"(?:%s|(?P<values>%s)|(?P<end>%s)|%s)" % (_BAR, _VALUES, _END, _HEADER) + LINE_ENDS_SOON)
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
"""Relative, of two numbers of four digits, which transformers 5 prints."""
_CLOCK_S = 1.0
_MOST_TOTALS = 20
_DAMAGED = 1e9
"""No run takes so many seconds, or does so many steps in one."""


class HuggingFaceReader:
    """Follows the bar of the training. Output to a file is buffered, and that of bars is not: what is logged may come
    long after the bar of its step, and after the bars of the next training."""

    def __init__(self) -> None:
        self.bar = _Bar()
        self.other_totals: set[int] = set()
        """Lengths of bars that are of an evaluation, or of another training."""
        self.epochs: list[float] = []
        """The first two that the training logged."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in _ANY.finditer(text, start, end):
            yield from self._see(match)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = [*self.find(text), *self.bar.release()]
        return steps, False

    def _see(self, match: "re.Match[bytes]") -> Iterator[StepLine]:
        if match["done"]:
            yield from self._see_bar(int(match["done"]), int(match["total"]), _seconds(match["clock"]))
        elif match["values"]:
            if len(self.epochs) < 2 and (epoch := _EPOCH.search(match["values"])):
                self.epochs.append(float(epoch[1]))
            self.bar.see_values(match["values"])
        elif match["end"]:
            yield from self._see_end(match["end"])
        elif match["steps"]:
            yield from self.bar.release()
            self.bar = _Bar(int(match["steps"].replace(b",", b"")))
        else:
            self.bar.start = int(match["from"])

    def _see_bar(self, done: int, total: int, clock_s: int) -> Iterator[StepLine]:
        self.bar.total = self.bar.total or total
        if total == self.bar.total:
            yield from self.bar.move(done, clock_s)
        elif len(self.other_totals) < _MOST_TOTALS:
            self.other_totals.add(total)

    def _see_end(self, text: bytes) -> Iterator[StepLine]:
        """If the bar was not timed, the step time is the mean of the whole run."""
        runtime, rate, loss = _RUNTIME.search(text), _RATE.search(text), _TRAIN_LOSS.search(text)
        seconds, per_s = number_or_none(runtime and runtime[1]) or 0.0, number_or_none(rate and rate[1]) or 0.0
        epochs, self.epochs = self.epochs, []
        yield from self.bar.release()
        if not 0 < seconds < _DAMAGED or not 0 <= per_s < _DAMAGED:
            return
        if self.other_totals and self.bar.total:
            self._check_bar(self.bar.total, seconds, per_s)
        steps = self.bar.steps_in(seconds, per_s)
        # Lines are logged at regular epochs: if the first one is late, others were logged before the run resumed.
        resumed = len(epochs) == 2 and epochs[0] > 1.5 * (epochs[1] - epochs[0]) > 0 and not self.bar.start
        if not self.bar.timed and steps > 0 and not resumed:
            last = self.bar.total or steps
            loss_value = number_or_none(loss and loss[1])
            yield StepLine(last, last, seconds / steps, loss_value, None, mean_of=steps, after=last - steps)

    def _check_bar(self, total: int, seconds: float, per_s: float) -> None:
        """Raises UsageError if it was another training than that of the bar which ended, or the bar is of none."""
        steps, error = seconds * per_s, _steps_error(seconds, per_s)
        if per_s and not self.bar.done - self.bar.anchor - error <= steps <= total + error:
            totals = ", ".join(map(str, sorted({total, *self.other_totals})))
            raise UsageError(
                f"it has progress bars of {totals} steps, and a training of {steps:.0f} ended: which bar belongs to"
                " which training is not known",
                do="give each training a log of its own",
            )


class _Bar:
    """The progress bar of a training."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.start = 0
        """The step that the run resumes from, if the log tells."""
        self.anchor = 0
        """The step from which on steps are timed."""
        self.done = 0
        self.clock_s = 0
        """What the bar showed last."""
        self.seen = False
        self.timed = False
        """A step was timed."""
        self.values = b""
        """What was logged since the last bar."""
        self.kept: StepLine | None = None
        """The step of the last bar, which may be printed again with what was logged."""

    def move(self, done: int, clock_s: int) -> Iterator[StepLine]:
        """Bars begin at 0 whatever was done before, and are printed at every step that takes 0.1 s. If the first one
        leaps within a second, the run has resumed, or its steps are fast: steps are timed from there."""
        if self.seen and done == self.done:
            return
        yield from self.release()
        steps, seconds = done - self.done, clock_s - self.clock_s
        if steps < 0:  # another training
            self.start, self.timed, self.seen = 0, False, False
        if not self.seen or (self.done == 0 and done != self.start + 1 and seconds == 0):
            self.anchor = done
        elif seconds >= 0:
            before = done - 1 if self.done == 0 else self.done
            self.kept = StepLine(
                step=done,
                last=self.total or done,
                step_time_s=seconds / (done - before),
                loss=None,
                tflops_per_gpu=None,
                mean_of=done - before,
                clock_s=_CLOCK_S,
                after=None if self.timed else before,
            )
            self.timed = True
            self.see_values(self.values)
        self.seen, self.done, self.clock_s = True, done, clock_s

    def see_values(self, values: bytes) -> None:
        """For the step of the bar; kept for the next bar if there is none."""
        self.values = values
        if self.kept and values:
            loss, grad_norm = _LOSS.search(values), _GRAD_NORM.search(values)
            self.kept = self.kept._replace(
                loss=number_or_none(loss and loss[1]), grad_norm=number_or_none(grad_norm and grad_norm[1])
            )
            self.values = b""

    def release(self) -> Iterator[StepLine]:
        if self.kept:
            yield self.kept
        self.kept = None

    def steps_in(self, seconds: float, per_s: float) -> int:
        """The steps of a run that ended, by the bar unless the rate contradicts: since transformers 5 it does not count
        those before the run resumed. 0 if their number is not known."""
        whole = (self.total or 0) - self.start
        error = _steps_error(seconds, per_s)
        if whole > 0 and (
            not per_s or min(abs(seconds * per_s - steps) for steps in (whole, self.total or 0)) <= error
        ):
            return whole
        return _steps_by_rate(seconds, per_s)


def _steps_error(seconds: float, per_s: float) -> float:
    """Error of the product, whose factors are rounded."""
    return 1 + seconds * (_RATE_ERROR + _DIGITS_ERROR * per_s)


def _steps_by_rate(seconds: float, steps_per_s: float) -> int:
    """0 if the rate tells neither their very number nor a step time to 0.2 %."""
    is_exact = seconds * _RATE_ERROR < 0.5
    return round(seconds * steps_per_s) if is_exact or steps_per_s >= _RATE_ERROR / 0.002 else 0


def _seconds(clock: bytes) -> int:
    """Seconds of ``MM:SS`` or ``H:MM:SS``."""
    total = 0
    for part in clock.split(b":"):
        total = 60 * total + int(part)
    return total


FORMAT = Format(
    name="huggingface",
    title="Hugging Face Trainer",
    marks=(b"'learning_rate': ", b"'train_runtime': ", b"%|", b"Total optimization steps = ", b" global step "),
    step=STEP,
    reader=HuggingFaceReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(rb"(?:Continuing training from|checkpoint with epoch \d{1,9} and) global step [1-9]"),
    step_marks=2,
)

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer (transformers 4.30 to 5.0, ``trainer.py``, ``trainer_callback.py`` and tqdm).

Every ``logging_steps`` steps ``{'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 4.5e-05, 'epoch': 0.1}``, without
a step number or a time (transformers 5 quotes the values); around it the progress bar, ``10%|# | 5/50 [01:02<09:18,
12.41s/it]``, with both; at the end ``{'train_runtime': 614.2, ...}``. A step is counted from 1, by the bar; its time is
the mean since the last bar that was read, from the bar's clock, which shows whole seconds. Where the bar is off
or in another file, only the mean of the whole run is known: it is the time of the last step.
"""

import re
import sys
from collections.abc import Iterator

from llmb.logs.formats.format import LINE_ENDS_SOON, NUMBER, Format, number_or_none
from llmb.logs.step_line import StepLine

_BAR = (
    rb"(?:(?<=[\r\n])|(?<=\d: )|\A) {0,9}\d{1,3}%\|[^|\r\n]{0,200}\| (?P<done>\d{1,9})/(?P<total>\d{1,9})"
    rb" \[(?P<clock>(?:\d{1,5}:)?\d\d:\d\d)<[^\]\r\n]{0,80}\]"
)
_VALUES = rb"\{'loss': [^{}\r\n]{1,600}'learning_rate': [^{}\r\n]{1,600}\}"
_END = rb"\{'train_runtime': [^{}\r\n]{1,600}\}"
_HEADER = rb"Total optimization steps = (?P<steps>[\d,]{1,12})(?=[\r\n])|from global step (?P<from>\d{1,9})(?=[\r\n])"
_ANY = re.compile(rb"(?:%s|(?P<values>%s)|(?P<end>%s)|%s)" % (_BAR, _VALUES, _END, _HEADER) + LINE_ENDS_SOON)
STEP = re.compile(rb"(?:%s|%s)" % (_VALUES, _END) + LINE_ENDS_SOON)
_FIELD = rb"'%s': '?(%s)'?[,}]"
_LOSS, _TRAIN_LOSS, _GRAD_NORM, _RUNTIME, _RATE = (
    re.compile(_FIELD % (name, NUMBER))
    for name in (b"loss", b"train_loss", b"grad_norm", b"train_runtime", b"train_steps_per_second")
)
_RATE_ERROR = 0.0005
"""Of ``train_steps_per_second``, which has three decimals."""


class HuggingFaceReader:
    def __init__(self) -> None:
        self.steps: int | None = None
        self.done = 0
        """The step of the last bar, and what its clock showed."""
        self.clock_s = 0
        self.at_start = False
        """That bar shows that nothing is done."""
        self.values = b""
        """What was logged since."""
        self.kept: StepLine | None = None
        """The step of the last bar, which may be printed again with what was logged."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in _ANY.finditer(text, start, end):
            yield from self._see(match)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = [*self.find(text), *self._release()]
        return steps, False

    def _see(self, match: "re.Match[bytes]") -> Iterator[StepLine]:
        if match["done"]:
            yield from self._see_bar(int(match["done"]), int(match["total"]), _seconds(match["clock"]))
        elif match["values"]:
            self._see_values(match["values"])
        elif match["end"]:
            yield from self._see_end(match["end"])
        elif match["steps"]:
            self.steps = int(match["steps"].replace(b",", b""))
        else:
            self.done = int(match["from"])

    def _see_bar(self, done: int, total: int, clock_s: int) -> Iterator[StepLine]:
        """Bars of other lengths are of an evaluation."""
        if self.steps is None:
            self.steps = total
        if total != self.steps or (done == self.done and self.kept):
            return
        yield from self._release()
        if done <= self.done:  # the run begins, or begins again
            self.done, self.clock_s, self.at_start = done, clock_s, done == 0
            return
        steps, seconds = done - self.done, clock_s - self.clock_s
        if self.at_start and seconds:  # a run that resumes leaps: the bar is printed at every step that takes 0.1 s
            steps = 1
        self.done, self.clock_s, self.at_start = done, clock_s, False
        self.kept = StepLine(done, total, seconds / steps, None, None, mean_of=steps)
        self._see_values(self.values)

    def _see_values(self, values: bytes) -> None:
        """For the step of the bar; kept for the next bar if there is none."""
        self.values = values
        if self.kept and values:
            loss, grad_norm = _LOSS.search(values), _GRAD_NORM.search(values)
            self.kept = self.kept._replace(
                loss=number_or_none(loss and loss[1]), grad_norm=number_or_none(grad_norm and grad_norm[1])
            )
            self.values = b""

    def _see_end(self, text: bytes) -> Iterator[StepLine]:
        timed = self.kept is not None
        yield from self._release()
        runtime, rate, loss = _RUNTIME.search(text), _RATE.search(text), _TRAIN_LOSS.search(text)
        seconds, per_s = number_or_none(runtime and runtime[1]), number_or_none(rate and rate[1])
        steps = self.steps or _steps_by_rate(seconds or 0, per_s or 0)
        if not timed and seconds and steps > 0:
            yield StepLine(steps, steps, seconds / steps, number_or_none(loss and loss[1]), None, mean_of=steps)
        self.steps, self.done, self.clock_s, self.values = None, 0, 0, b""

    def _release(self) -> Iterator[StepLine]:
        if self.kept:
            yield self.kept
        self.kept = None


def _steps_by_rate(seconds: float, steps_per_s: float) -> int:
    """0 if the rate, which is rounded, tells neither their very number nor a step time to 0.2 %."""
    is_exact = seconds * _RATE_ERROR < 0.5
    return round(seconds * steps_per_s) if is_exact or steps_per_s >= _RATE_ERROR / 0.002 else 0


def _seconds(clock: bytes) -> int:
    """Of ``MM:SS`` or ``H:MM:SS``."""
    total = 0
    for part in clock.split(b":"):
        total = 60 * total + int(part)
    return total


FORMAT = Format(
    name="huggingface",
    title="Hugging Face Trainer",
    marks=(b"'learning_rate': ", b"'train_runtime': ", b"%|", b"Total optimization steps = ", b"from global step "),
    step=STEP,
    reader=HuggingFaceReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(rb"Continuing training from global step [1-9]"),
    saved=b"Saving model checkpoint to ",
    step_marks=2,
)

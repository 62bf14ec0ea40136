# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed (0.6 to 0.18, ``utils/timer.py``, ``runtime/engine.py`` and ``runtime/pipe/engine.py``).

With ``wall_clock_breakdown``, each step prints ``[Rank 0] time (ms) | fwd: 3865.91 | bwd: 11249.43 | bwd_inner: ... |
step: 888.45`` without its number; the sum of fwd, bwd and step is the step time. Every ``steps_per_print`` steps
``step=10, skipped=0, lr=[...]`` and ``epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=58.7,
CurrSamplesPerSec=61.3, ...`` precede it: the configured ``train_batch_size`` divided by the second rate is the time
without waits for data. Pipelines print ``steps: 10 loss: 1.2345 iter time (s): 1.234 samples/sec: 12.3``, the mean
since the previous line. Steps are counted from 1; no line has their total. After the arguments of Megatron-DeepSpeed,
only Megatron's lines are read.
"""

import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import (
    LEAST_PRINTED_S,
    LINE_ENDS_SOON,
    NUMBER,
    Format,
    number_or_none,
    rank_before,
)
from llmb.readers.logs.step_line import StepLine

_TIMERS = (
    rb"time \(ms\) \| fwd: (?P<fwd>%s) \| bwd: (?P<bwd>%s)(?: \| bwd_inner: %s)?(?: \| bwd_allreduce: %s)?"
    rb" \| step: (?P<step>%s)(?=[\s|])" % (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
)
_RATE = (
    rb"global_step=(?P<global>\d{1,9}), RunningAvgSamplesPerSec=[^,\s]{1,40}, CurrSamplesPerSec=(?P<rate>%s)," % NUMBER
)
_PIPE = (
    rb"steps: (?P<steps>\d{1,9}) loss: (?P<loss>%s) [^\r\n]{0,400}?iter time \(s\): (?P<seconds>%s) samples/sec: "
    rb"(?P<samples>%s)?" % (NUMBER, NUMBER, NUMBER)
)
_NOTES = (
    rb"step=(?P<done>\d{1,9}), skipped=(?P<skipped>\d{1,9}), lr="
    rb"|\btrain_batch_size(?: \.{2,40} |\" ?: ?)(?P<batch>[1-9]\d{0,8})(?=[\s,}])"
)
_ANY = re.compile(rb"(?:%s|%s|%s|%s)" % (_TIMERS, _RATE, _PIPE, _NOTES) + LINE_ENDS_SOON)
STEP = re.compile(rb"(?:%s|%s|%s)" % (_TIMERS, _RATE, _PIPE) + LINE_ENDS_SOON)


MOST_SAMPLES = 1e9
"""Maximum number of samples in a step; larger numbers are considered damaged."""
SAMPLES_ERROR = 0.05
"""Maximum relative error of the product of a rate and a time, both rounded."""


class DeepSpeedReader:
    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, batch: int) -> None:
        """Reset the state at the start of a run with the global batch size ``batch``; 0 if unknown."""
        self.batch = batch
        self.done = 0
        self.announced: int | None = None
        """The step of the next timers, if it was logged."""
        self.skipped, self.skipped_before = 0, 0
        self.has_timers = False

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in _ANY.finditer(text, start, end):
            if match["batch"]:
                self._begin(int(match["batch"]))
            elif match["done"]:
                self.announced, self.skipped = int(match["done"]), int(match["skipped"])
            elif step := self._read(match):
                yield step._replace(rank=rank_before(text, match.start(), start))

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        steps = list(self.find(text))
        return steps, not steps and (b"time (ms) | fwd: " in text or b"CurrSamplesPerSec=" in text)

    def _read(self, match: "re.Match[bytes]") -> StepLine | None:
        """Return a line's step; None if the line has no usable time, or if it repeats a step whose timers were read."""
        if match["fwd"]:
            self.has_timers, number = True, self.announced or self.done + 1
            seconds = sum(float(match[name]) for name in ("fwd", "bwd", "step")) / 1000
            self.announced = None
            return None if seconds == 0 else self._line(number, seconds)
        if match["rate"]:
            rate, number = float(match["rate"]), int(match["global"])
            if self.has_timers or not self.batch or not rate > 0:
                return None
            return self._line(number, self.batch / rate)
        if float(match["seconds"]) < LEAST_PRINTED_S:
            return None
        number = int(match["steps"])
        mean_of = number - self.done if number > self.done else 1
        seconds = float(match["seconds"])
        gbs = self._batch(seconds * (number_or_none(match["samples"]) or 0.0))
        return self._line(number, seconds, number_or_none(match["loss"]), mean_of)._replace(gbs=gbs)

    def _batch(self, samples: float) -> int | None:
        """Return the configured batch size, or ``samples`` rounded if it is unknown or differs; None if implausible."""
        if not 0 < samples < MOST_SAMPLES:
            return None
        return self.batch if self.batch and abs(samples / self.batch - 1) < SAMPLES_ERROR else round(samples)

    def _line(self, number: int, seconds: float, loss: float | None = None, mean_of: int = 1) -> StepLine:
        skipped = max(0, self.skipped - self.skipped_before) if number > self.done else 0
        self.done, self.skipped_before = number, self.skipped
        return StepLine(number, number, seconds, loss, None, skipped=skipped, mean_of=mean_of)


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed",
    marks=(
        b"time (ms) | fwd: ",
        b"CurrSamplesPerSec=",
        b" iter time (s): ",
        b", skipped=",
        b"train_batch_size",
        b"- arguments -",
    ),
    step=STEP,
    reader=DeepSpeedReader,
    first_number=1,
    step_marks=3,
    unless=re.compile(rb"-{10} arguments -{10}"),
)

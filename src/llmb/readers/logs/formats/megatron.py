# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM (core 0.6 to 0.19, ``megatron/training/training.py``) and Megatron-Bridge (v0.2.0 to v0.6.0,
``training/utils/train_utils.py``).

`` [time] iteration 50/ 50 | consumed samples: .. | elapsed time per iteration (ms): 9089.0 | ...``, counted from 1, by
the last rank. Throughput is in that line (Megatron-LM: ``throughput per GPU (TFLOP/s/GPU): 239.8``), or in a separate
line before it, by the first rank (Megatron-Bridge: ``Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU``).
Primus adds means (``(ms): 5678.9/5690.1``, ``239.8/240.1``); Megatron-DeepSpeed prints ``TFLOPs: 153.38``,
and in some versions ``(s): 11.18``. With ``log_interval`` n, every n-th iteration is logged and its time is the mean of
n. The first iteration after a start is logged, too; since 2026 the timer keeps running after it, so that the mean in
the second line includes it. No time includes evaluations and checkpoints, which have lines of their own.
"""

import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from llmb.readers.logs.formats.format import (
    LINE_ENDS_SOON,
    NUMBER,
    Format,
    find_bad_loss,
    has_any,
    moment_before,
    rank_before,
)
from llmb.readers.logs.step_line import StepLine

LAST_FIELD = b"number of nan iterations:"

_DECIMAL = rb"(\d{1,12}(?:\.\d{1,9})?)"
# The pattern begins with literal text, which is found fast. A value counts only if the bar after it is there.
STEP = re.compile(
    rb"iteration +(?P<step>\d{1,9})/ *(?P<last>\d{1,9}) \|[^\r\n]{0,400}?"
    rb" elapsed time per iteration \((?P<unit>m?s)\): (?P<time>\d{1,12}(?:\.\d{1,9})?)(?:/[\d.]{1,20})? \|"
    rb"(?P<body>[^\r\n]{0,3000}+)(?:[\r\n]|\Z)"
)
_UTILIZATION = re.compile(
    rb"(?:Step Time : %ss )?GPU utilization: %s ?(?:MODEL_)?TFLOP/s/GPU" % (_DECIMAL, _DECIMAL) + LINE_ENDS_SOON
)
_UNENDED = re.compile(rb"iteration +\d{1,9}/ *\d{1,9} \|")
_THROUGHPUT = re.compile(rb" (?:throughput per GPU \(TFLOP/s/GPU\)|TFLOPs): %s(?:/[\d.]{1,20})? {1,2}\|" % _DECIMAL)
_LOSS, _ANY_LOSS = (re.compile(name + rb" (%s) \|" % NUMBER, re.IGNORECASE) for name in (rb" lm loss:", rb"loss:"))
_GBS = re.compile(rb" global batch size: {1,9}(\d{1,9}) \|")
_SAMPLES = re.compile(rb" consumed samples: {1,15}(\d{1,15}) \|")
_RATE = re.compile(
    rb" (?:tokens per gpu per second \(tgs\)|tokens per GPU \(tokens/s/GPU\)): %s(?:/[\d.]{1,20})? \|" % _DECIMAL
)
_GRAD_NORM = re.compile(rb" grad norm: (%s) \|" % NUMBER, re.IGNORECASE)
_SKIPPED = re.compile(rb" number of (?:skipped|nan) iterations: {1,9}(\d{1,9}) \|")
"""Matches two counts; an iteration that is skipped because of a non-finite loss is in both."""
_CLOCK = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)\] {1,4}\Z")
_CLOCK_ERROR_S, _CLOCK_ERROR = 1.0, 0.05
"""Absolute and relative tolerance between a sum of step times and timestamps, which may be in whole seconds."""
LOADED = b"successfully loaded checkpoint from"
_LOADED = re.compile(LOADED + rb" [^\r\n]{0,500}? at iteration (\d{1,9})")
_INTERRUPTIONS = (
    b"validation loss at iteration ",
    b" saved checkpoint from iteration ",
    b"saving checkpoint at iteration ",
)
_MOST_WAITING = 4
_LEAST_S = 0.5
"""Below this time, rounding to hundredths of a second is an error of more than 1 %."""


class _Utilization(NamedTuple):
    step_time_s: float | None
    """The step time, rounded to 0.01 s."""
    tflops_per_gpu: float

    def is_of(self, seconds: float) -> bool:
        return self.step_time_s is None or abs(self.step_time_s - seconds) <= 0.006 + 0.01 * seconds


class MegatronReader:
    """Pairs each iteration with the throughput logged before it. Different ranks write these lines, so that two
    throughputs may follow each other: each is kept until the iteration with the same time."""

    def __init__(self) -> None:
        self.waiting: deque[_Utilization] = deque(maxlen=_MOST_WAITING)
        self.loaded: int | None = None
        """The iteration of a checkpoint that was loaded since the last line."""
        self.first: StepLine | None = None
        """The line of the first iteration after a start, if it was the last line."""
        self.interrupted = False
        """True after an evaluation or a checkpoint."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        place, end = start, min(end, len(text))
        for match in STEP.finditer(text, start, end):
            self._look_between(text, place, match.start())
            place = match.end()
            if step := self._read(match, rank_before(text, match.start(), start)):
                logged_s = moment_before(_CLOCK, text, match.start())
                step = step._replace(logged_s=logged_s, interrupted=self.interrupted)
                self.interrupted = False
                yield self._of_its_own(step)
        self._look_between(text, place, end)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        match = STEP.search(text)
        if match and LAST_FIELD in match["body"] and match["body"].rstrip().endswith(b"|"):
            step = self._read(match, rank_before(text, match.start()))
            return ([step] if step else []), False
        return [], _UNENDED.search(text) is not None

    def _of_its_own(self, line: StepLine) -> StepLine:
        """Return the line; subtract the first iteration's time from the second line's if the timestamps show that
        it is included."""
        (first, self.first), (loaded, self.loaded) = (self.first, None), (self.loaded, None)
        if loaded and line.step > loaded:
            line = line._replace(after=loaded)
        if line.step == 1 + (line.after or 0):
            self.first = line
            return line
        if not first or not first.logged_s or not line.logged_s or line.step <= first.step:
            return line
        steps, passed_s = line.step - first.step, line.logged_s - first.logged_s
        own_s = (steps + 1) * line.step_time_s - first.step_time_s
        error_s = abs(passed_s - own_s)
        if own_s <= 0 or error_s > _CLOCK_ERROR_S + _CLOCK_ERROR * own_s or passed_s <= 0:
            return line
        if error_s >= abs(passed_s - steps * line.step_time_s):
            return line
        return line._replace(step_time_s=own_s / steps, tflops_per_gpu=None)  # which is a mean that includes the first

    def _look_between(self, text: bytes, start: int, end: int) -> None:
        self.interrupted = self.interrupted or has_any(text, _INTERRUPTIONS, start, end)
        for match in _LOADED.finditer(text, start, end) if text.find(LOADED, start, end) >= 0 else ():
            self.loaded = int(match[1])
        for seconds, tflops in (match.groups() for match in _UTILIZATION.finditer(text, start, end)):
            self.waiting.append(_Utilization(float(seconds) if seconds else None, float(tflops)))

    def _read(self, match: "re.Match[bytes]", rank: int | None) -> StepLine | None:
        """Return the step of a line; None for iteration 0, which Megatron never logs, and for a step that is too short
        for a time in hundredths of a second."""
        body, seconds = match["body"], float(match["time"]) / (1000 if match["unit"] == b"ms" else 1)
        own = _THROUGHPUT.search(body)
        tflops = float(own[1]) if own else self._take_utilization(seconds)
        if int(match["step"]) == 0 or (match["unit"] == b"s" and seconds < _LEAST_S):
            return None
        loss, grad_norm = _LOSS.search(body) or _ANY_LOSS.search(body), _GRAD_NORM.search(body)
        bad, gbs, samples = find_bad_loss(body), _GBS.search(body), _SAMPLES.search(match[0])
        rate = _RATE.search(body) if b" tokens per " in body else None
        return StepLine(
            step=int(match["step"]),
            last=int(match["last"]),
            step_time_s=seconds,
            loss=bad if bad is not None or not loss else float(loss[1]),
            tflops_per_gpu=tflops,
            grad_norm=float(grad_norm[1]) if grad_norm else None,
            skipped=max(map(int, _SKIPPED.findall(body)), default=0),
            rank=rank,
            gbs=int(gbs[1]) if gbs else None,
            samples=int(samples[1]) if samples else None,
            tokens_per_s_per_gpu=float(rate[1]) if rate else None,
        )

    def _take_utilization(self, seconds: float) -> float | None:
        """Return the first waiting throughput with the iteration's time, else the first, if any; drop all up to it."""
        if not self.waiting:
            return None
        index = next((i for i, line in enumerate(self.waiting) if line.is_of(seconds)), 0)
        for _ in range(index):
            self.waiting.popleft()
        return self.waiting.popleft().tflops_per_gpu


FORMAT = Format(
    name="megatron",
    title="Megatron-LM, Megatron-Bridge, Megatron-DeepSpeed or Primus",
    marks=(b"elapsed time per iteration (", b"GPU utilization: ", LOADED),
    step=STEP,
    reader=MegatronReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(LOADED),
)

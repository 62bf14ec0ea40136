# SPDX-License-Identifier: Apache-2.0
"""MaxText (0.1 and main of 2025, ``src/MaxText/metric_logger.py``).

``completed step: 49, seconds: 7.908, TFLOP/s/device: 460.480, Tokens/s/device: 1035.970, total_weights: 65536, loss:
10.843``: every host logs every step, counted from 0. A device is one GPU, or one chip or core of a TPU. The number of
steps is in the configuration that is logged first (``Config param steps: 50``). While the batch grows, lines begin with
``[Rampup Batch Size Phase], `` and have no rates; steps at a profiler's start and end have neither rates nor a time
(``completed profiler activation/deactivation step: 5, total_weights: ..``).
"""

import math
import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import LEAST_PRINTED_S, NUMBER, Format, find_bad_loss, number_or_none, rank_before
from llmb.readers.logs.step_line import StepLine

STEP_HEAD = b"completed step: "
PROFILER_HEAD = b"completed profiler activation/deactivation step: "
RAMP_UP = b"[Rampup Batch Size Phase], "
_BODY = rb"([^\r\n]{0,1000}+)(?:[\r\n]|\Z)"
STEP = re.compile(
    rb"completed step: (\d{1,9}), seconds: (%s),(?: live slice count: \d{1,9},)?(?: TFLOP/s/device: (%s),)?"
    % (NUMBER, NUMBER)
    + _BODY
)
_PROFILED = re.compile(PROFILER_HEAD + rb"(\d{1,9})," + _BODY)
_STEPS = re.compile(rb"Config param steps: (\d{1,9})[\r\n]")
_LOSS = re.compile(rb" loss: (%s)(?:,|$)" % NUMBER)
_GRAD_NORM = re.compile(rb" grad_norm: (%s)(?:,|$)" % NUMBER)
_RATE = re.compile(rb" Tokens/s/device: (%s)," % NUMBER)
_TOKENS = re.compile(rb" total_weights: (\d{1,15})(?:\.0{0,9})?(?:,|$)")


class MaxTextReader:
    def __init__(self) -> None:
        self.steps: int | None = None

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        place = start
        for match in STEP.finditer(text, start, end):
            yield from self._before(text, place, match.start())
            place = match.end()
            if step := self._read(match, rank_before(text, match.start(), start)):
                yield step._replace(ramped_up=text.endswith(RAMP_UP, start, match.start()))
        yield from self._before(text, place, end)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        match = STEP.search(text)
        if match and _LOSS.search(match[4]):
            step = self._read(match, rank_before(text, match.start()))
            return ([step._replace(loss=None)] if step else []), False
        return list(self._before(text, 0, len(text))), STEP_HEAD in text

    def _before(self, text: bytes, start: int, end: int) -> Iterator[StepLine]:
        """Yield profiled steps, which have no time, in text between step lines; note the run's number of steps."""
        for match in _STEPS.finditer(text, start, end):
            self.steps = int(match[1])
        for match in _PROFILED.finditer(text, start, end) if text.find(PROFILER_HEAD, start, end) >= 0 else ():
            loss = find_loss(match[2])
            number, rank = int(match[1]), rank_before(text, match.start(), start)
            yield StepLine(number, self._last(number), math.nan, loss, None, rank=rank, profiled=True)

    def _last(self, step: int) -> int:
        return step if self.steps is None else max(step, self.steps - 1)

    def _read(self, match: "re.Match[bytes]", rank: int | None) -> StepLine | None:
        if float(match[2]) < LEAST_PRINTED_S:
            return None
        step, rest = int(match[1]), match[4]
        rate, tokens, grad_norm = (pattern.search(rest) for pattern in (_RATE, _TOKENS, _GRAD_NORM))
        return StepLine(
            step=step,
            last=self._last(step),
            step_time_s=float(match[2]),
            loss=find_loss(rest),
            tflops_per_gpu=number_or_none(match[3]),
            grad_norm=number_or_none(grad_norm and grad_norm[1]),
            rank=rank,
            tokens=int(tokens[1]) if tokens else None,
            tokens_per_s_per_gpu=number_or_none(rate and rate[1]),
        )


def find_loss(rest: bytes) -> float | None:
    """Return the loss in a line, preferably a loss that is not finite; None if the line has none."""
    loss, bad = _LOSS.search(rest), find_bad_loss(rest)
    return number_or_none(loss and loss[1]) if bad is None else bad


FORMAT = Format(
    name="maxtext",
    title="MaxText",
    marks=(STEP_HEAD, PROFILER_HEAD, b"Config param steps: ", b"restoring from this run's directory"),
    step=STEP,
    reader=MaxTextReader,
    resumed=re.compile(rb"restoring from this run's directory step [1-9]"),
)

# SPDX-License-Identifier: Apache-2.0
"""MaxText (0.1 and main of 2025, ``src/MaxText/metric_logger.py``).

``completed step: 49, seconds: 7.908, TFLOP/s/device: 460.480, Tokens/s/device: 1035.970, total_weights: 65536, loss:
10.843``: every step, counted from 0, on every host. A device is one GPU, or one chip or core of a TPU. The number of
steps is in the configuration that is logged first (``Config param steps: 50``).
"""

import re
import sys
from collections.abc import Iterator

from llmb.logs.formats.format import LEAST_PRINTED_S, NUMBER, Format, number_or_none, rank_before
from llmb.logs.step_line import StepLine

STEP_HEAD = b"completed step: "
STEP = re.compile(
    rb"completed step: (\d{1,9}), seconds: (%s),(?: live slice count: \d{1,9},)?(?: TFLOP/s/device: (%s),)?"
    rb"([^\r\n]{0,1000}+)(?:[\r\n]|\Z)" % (NUMBER, NUMBER)
)
_STEPS = re.compile(rb"Config param steps: (\d{1,9})[\r\n]")
_LOSS = re.compile(rb" loss: (%s)(?:,|$)" % NUMBER)
_GRAD_NORM = re.compile(rb" grad_norm: (%s)(?:,|$)" % NUMBER)


class MaxTextReader:
    def __init__(self) -> None:
        self.steps: int | None = None

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        place = start
        for match in STEP.finditer(text, start, end):
            self._find_header(text, place, match.start())
            place = match.end()
            if step := self._read(match, rank_before(text, match.start(), start)):
                yield step
        self._find_header(text, place, end)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        match = STEP.search(text)
        if match and _LOSS.search(match[4]):
            step = self._read(match, rank_before(text, match.start()))
            return ([step._replace(loss=None)] if step else []), False
        return [], STEP_HEAD in text

    def _find_header(self, text: bytes, start: int, end: int) -> None:
        for match in _STEPS.finditer(text, start, end):
            self.steps = int(match[1])

    def _read(self, match: "re.Match[bytes]", rank: int | None) -> StepLine | None:
        if float(match[2]) < LEAST_PRINTED_S:
            return None
        step, rest = int(match[1]), match[4]
        loss, grad_norm = _LOSS.search(rest), _GRAD_NORM.search(rest)
        return StepLine(
            step=step,
            last=step if self.steps is None else max(step, self.steps - 1),
            step_time_s=float(match[2]),
            loss=number_or_none(loss and loss[1]),
            tflops_per_gpu=number_or_none(match[3]),
            grad_norm=number_or_none(grad_norm and grad_norm[1]),
            rank=rank,
        )


FORMAT = Format(
    name="maxtext",
    title="MaxText",
    marks=(STEP_HEAD, b"Config param steps: ", b"restoring from this run's directory"),
    step=STEP,
    reader=MaxTextReader,
    resumed=re.compile(rb"restoring from this run's directory step [1-9]"),
)

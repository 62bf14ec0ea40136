# SPDX-License-Identifier: Apache-2.0
"""The lines that Megatron-LM and Megatron-Bridge log after each iteration.

An iteration is ``iteration N/ LAST | ... elapsed time per iteration (ms): T | ...``, counted from 1. Throughput is
logged in that line, or in a line of its own before it (``GPU utilization: F MODEL_TFLOP/s/GPU``). Formats:
Megatron-Bridge v0.2.0 to v0.6.0, ``training/utils/train_utils.py``.
"""

import re
import sys
from collections.abc import Iterator

from llmb.logs.step_line import StepLine

LOADED = b"successfully loaded checkpoint from"
MARK = b"elapsed time per iteration (ms): "
"""Found in a line that logs an iteration."""
LAST_FIELD = b"number of nan iterations:"

_NUMBER = rb"(\d{1,12}(?:\.\d{1,9})?)"
# Every repetition is bounded, so that text without line ends takes no quadratic time. The pattern begins with literal
# text, which is found fast.
_STEP = re.compile(
    rb"iteration +(?P<step>\d{1,9})/ *(?P<last>\d{1,9}) \|[^\r\n]{0,400}?"
    rb" elapsed time per iteration \(ms\): (?P<ms>\d{1,12}(?:\.\d{1,9})?) \|(?P<body>[^\r\n]{0,3000}+)(?:[\r\n]|\Z)"
)
_UTILISATION_HEAD = b"GPU utilization: "
_UTILISATION = re.compile(_UTILISATION_HEAD + _NUMBER + rb" ?(?:MODEL_)?TFLOP/s/GPU")
_UNENDED = re.compile(rb"iteration +\d{1,9}/ *\d{1,9} \|")
_THROUGHPUT = re.compile(rb" throughput per GPU \(TFLOP/s/GPU\): " + _NUMBER)
_VALUE = rb"(-?(?:\d{1,12}(?:\.\d{1,12})?(?:E[+-]\d{1,3})?|nan|inf))"
_LOSS = re.compile(rb" lm loss: " + _VALUE, re.IGNORECASE)
_GRAD_NORM = re.compile(rb" grad norm: " + _VALUE, re.IGNORECASE)


class MegatronLines:
    """Finds the steps of a log chunk by chunk, and pairs each with the throughput that was logged before it."""

    def __init__(self) -> None:
        self.tflops_per_gpu: float | None = None

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        """The steps in ``text[start:end]``, which consists of complete lines."""
        place, end = start, min(end, len(text))
        for match in _STEP.finditer(text, start, end):
            self._find_utilization(text, place, match.start())
            place = match.end()
            if step := self._read(match):
                yield step
        self._find_utilization(text, place, end)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        """The step in a file's last line, which has no line end, and whether the line was truncated."""
        match = _STEP.search(text)
        if match and LAST_FIELD in match["body"] and match["body"].rstrip().endswith(b"|"):
            step = self._read(match)
            return ([step] if step else []), False
        return [], _UNENDED.search(text) is not None

    def _find_utilization(self, text: bytes, start: int, end: int) -> None:
        """Keeps the last one."""
        at = text.rfind(_UTILISATION_HEAD, start, end)
        if at >= 0 and (match := _UTILISATION.match(text, at, end)):
            self.tflops_per_gpu = float(match[1])

    def _read(self, match: "re.Match[bytes]") -> StepLine | None:
        """None for a line that counts from 0, which Megatron never does."""
        body, number = match["body"], int(match["step"])
        own = _THROUGHPUT.search(body)
        tflops, self.tflops_per_gpu = (float(own[1]) if own else self.tflops_per_gpu), None
        if number == 0:
            return None
        loss, grad_norm = _LOSS.search(body), _GRAD_NORM.search(body)
        return StepLine(
            step=number - 1,
            last=int(match["last"]) - 1,
            step_time_s=float(match["ms"]) / 1000,
            loss=float(loss[1]) if loss else None,
            tflops_per_gpu=tflops,
            grad_norm=float(grad_norm[1]) if grad_norm else None,
        )


def first_step(text: bytes, start: int = 0, end: int = sys.maxsize) -> int | None:
    """Where the line of the first step in ``text[start:end]`` begins."""
    match = _STEP.search(text, start, end)
    if not match:
        return None
    at = match.start()
    return max(text.rfind(b"\n", start, at), text.rfind(b"\r", start, at), start - 1) + 1

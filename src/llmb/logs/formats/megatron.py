# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM (core 0.6 to 0.19, ``megatron/training/training.py``) and Megatron-Bridge (v0.2.0 to v0.6.0,
``training/utils/train_utils.py``).

`` [time] iteration       50/      50 | consumed samples: .. | elapsed time per iteration (ms): 9089.0 | ...``, counted
from 1, by the last rank. Throughput is in that line (Megatron-LM: ``throughput per GPU (TFLOP/s/GPU): 239.8``), or
in a line of its own before it, by the first rank (Megatron-Bridge: ``Step Time : 9.09s GPU utilization:
663.5MODEL_TFLOP/s/GPU``). Primus has means beside them (``(ms): 5678.9/5690.1``, ``239.8/240.1``); Megatron-DeepSpeed
prints ``TFLOPs: 153.38``, and in some versions ``(s): 11.18``. With ``log_interval`` n, every n-th iteration is logged
and its time is the mean of n.
"""

import re
import sys
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from llmb.logs.formats.format import LINE_ENDS_SOON, NUMBER, Format, rank_before
from llmb.logs.step_line import StepLine

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
_LOSS = re.compile(rb" lm loss: (%s) \|" % NUMBER, re.IGNORECASE)
_GRAD_NORM = re.compile(rb" grad norm: (%s) \|" % NUMBER, re.IGNORECASE)
_SKIPPED = re.compile(rb" number of (?:skipped|nan) iterations: {1,9}(\d{1,9}) \|")
"""An iteration that is skipped because its loss is not finite is counted in both."""
_CLOCK = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?)\] {1,4}\Z")
_CLOCK_BYTES = 40
_MOST_WAITING = 4
_LEAST_S = 0.5
"""Hundredths of seconds are 1 % of it."""


class _Utilization(NamedTuple):
    step_time_s: float | None
    """To 0.01 s."""
    tflops_per_gpu: float

    def is_of(self, seconds: float) -> bool:
        return self.step_time_s is None or abs(self.step_time_s - seconds) <= 0.006 + 0.01 * seconds


class MegatronReader:
    """Pairs each iteration with the throughput that was logged before it.

    Two ranks write these lines, so that two of one kind may come in a row: each waits for the iteration that took as
    long.
    """

    def __init__(self) -> None:
        self.waiting: deque[_Utilization] = deque(maxlen=_MOST_WAITING)

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        place, end = start, min(end, len(text))
        for match in STEP.finditer(text, start, end):
            self._find_utilization(text, place, match.start())
            place = match.end()
            if step := self._read(match, rank_before(text, match.start(), start)):
                yield step._replace(logged_s=_clock_before(text, match.start()))
        self._find_utilization(text, place, end)

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        match = STEP.search(text)
        if match and LAST_FIELD in match["body"] and match["body"].rstrip().endswith(b"|"):
            step = self._read(match, rank_before(text, match.start()))
            return ([step] if step else []), False
        return [], _UNENDED.search(text) is not None

    def _find_utilization(self, text: bytes, start: int, end: int) -> None:
        for seconds, tflops in (match.groups() for match in _UTILIZATION.finditer(text, start, end)):
            self.waiting.append(_Utilization(float(seconds) if seconds else None, float(tflops)))

    def _read(self, match: "re.Match[bytes]", rank: int | None) -> StepLine | None:
        """None for a line that counts from 0, which Megatron never does, and for hundredths of seconds that are too
        coarse for the step."""
        body, seconds = match["body"], float(match["time"]) / (1000 if match["unit"] == b"ms" else 1)
        own = _THROUGHPUT.search(body)
        tflops = float(own[1]) if own else self._take_utilization(seconds)
        if int(match["step"]) == 0 or (match["unit"] == b"s" and seconds < _LEAST_S):
            return None
        loss, grad_norm = _LOSS.search(body), _GRAD_NORM.search(body)
        return StepLine(
            step=int(match["step"]),
            last=int(match["last"]),
            step_time_s=seconds,
            loss=float(loss[1]) if loss else None,
            tflops_per_gpu=tflops,
            grad_norm=float(grad_norm[1]) if grad_norm else None,
            skipped=max(map(int, _SKIPPED.findall(body)), default=0),
            rank=rank,
        )

    def _take_utilization(self, seconds: float) -> float | None:
        """That of the first line that took as long as the iteration, else of the first; those before it are lost."""
        if not self.waiting:
            return None
        index = next((i for i, line in enumerate(self.waiting) if line.is_of(seconds)), 0)
        for _ in range(index):
            self.waiting.popleft()
        return self.waiting.popleft().tflops_per_gpu


def _clock_before(text: bytes, at: int) -> float | None:
    """The time stamp before an iteration, if there is one."""
    match = _CLOCK.search(text, max(0, at - _CLOCK_BYTES), at)
    try:
        return datetime.fromisoformat(match[1].decode()).timestamp() if match else None
    except (ValueError, OverflowError):
        return None


FORMAT = Format(
    name="megatron",
    title="Megatron-LM, Megatron-Bridge, Megatron-DeepSpeed or Primus",
    marks=(b"elapsed time per iteration (", b"GPU utilization: ", b"successfully loaded checkpoint from"),
    step=STEP,
    reader=MegatronReader,
    first_number=1,
    mean_of_interval=True,
    resumed=re.compile(rb"successfully loaded checkpoint from"),
)

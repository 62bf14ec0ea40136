# SPDX-License-Identifier: Apache-2.0
"""nanotron (0.4 and main of 2025, ``src/nanotron/trainer.py`` and ``logging.py``).

``iteration: 50 / 50 | consumed_tokens: 52.4M | elapsed_time_per_iteration_ms: 1.23K | ... | lm_loss: 5.43 | ... |
model_tflops_per_gpu: 398 | ...``, counted from 1, with three significant digits and the suffixes K to E (``infE``);
earlier versions print plain decimals. The time is that of the logged iteration, even if only every n-th is logged.
"""

import re
import sys
from collections.abc import Iterator

from llmb.readers.logs.formats.format import Format, find_bad_loss, rank_before
from llmb.readers.logs.step_line import StepLine

_NUMBER = rb"(-?(?:\d{1,12}(?:\.\d{1,12})?(?:[eE][+-]?\d{1,3})?|nan|inf))([KMGBTPE]?)"
STEP = re.compile(
    rb"iteration: (?P<step>\d{1,9}) / (?P<last>\d{1,9}) \|[^\r\n]{0,400}?"
    rb" (?:elapsed_)?time_per_iteration_ms: (?P<ms>%s) \|(?P<body>[^\r\n]{0,3000}+)(?:[\r\n]|\Z)" % _NUMBER
)
_LOSS = re.compile(rb" lm_loss: %s \|" % _NUMBER)
_TFLOPS = re.compile(rb" model_tflops_per_gpu: %s \|" % _NUMBER)
_GRAD_NORM = re.compile(rb" grad_norm: %s(?= \||\s|$)" % _NUMBER)
_GBS = re.compile(rb" global_batch_size: (\d{1,9}) \|")
_RATE = re.compile(rb" tokens_per_sec_per_gpu: %s \|" % _NUMBER)
_FACTORS = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15, b"E": 1e18}
_UNENDED = re.compile(rb"iteration: \d{1,9} / \d{1,9} \|")


class NanotronReader:
    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
        for match in STEP.finditer(text, start, end):
            yield _read(match, rank_before(text, match.start(), start))

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        match = STEP.search(text)
        if match and _LOSS.search(match["body"]):
            return [_read(match, rank_before(text, match.start()))], False
        return [], _UNENDED.search(text) is not None


def _read(match: "re.Match[bytes]", rank: int | None) -> StepLine:
    body = match["body"]
    gbs, bad = _GBS.search(body), find_bad_loss(body)
    return StepLine(
        step=int(match["step"]),
        last=max(int(match["last"]), int(match["step"])),
        step_time_s=_scaled(match[4], match[5]) / 1000,
        loss=_value(_LOSS.search(body)) if bad is None else bad,
        tflops_per_gpu=_value(_TFLOPS.search(body)),
        grad_norm=_value(_GRAD_NORM.search(body)),
        rank=rank,
        gbs=int(gbs[1]) if gbs else None,
        tokens_per_s_per_gpu=_value(_RATE.search(body)),
    )


def _value(match: "re.Match[bytes] | None") -> float | None:
    return _scaled(match[1], match[2]) if match else None


def _scaled(number: bytes, suffix: bytes) -> float:
    return float(number) * _FACTORS[suffix]


FORMAT = Format(
    name="nanotron",
    title="nanotron",
    marks=(b"time_per_iteration_ms: ", b"start_iteration_step: "),
    step=STEP,
    reader=NanotronReader,
    first_number=1,
    resumed=re.compile(rb"start_iteration_step: [1-9]"),
)

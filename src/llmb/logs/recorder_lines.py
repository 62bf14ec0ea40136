# SPDX-License-Identifier: Apache-2.0
"""Lines by which a profiler or NCCL's log shows in a run's log that it slowed the run down."""

import re
from typing import Literal

from llmb.logs.formats.format import has

Slowed = Literal["profiled", "traced"]

_SIGNS: tuple[tuple[Slowed, tuple[bytes, ...], "re.Pattern[bytes]", str], ...] = (
    (
        "profiled",
        (b"Capture range ", b"nsys-report"),
        re.compile(rb"Capture range (?:started|ended) in the application\.|Generating '[^'\r\n]{0,200}nsys-report"),
        "Nsight Systems was attached",
    ),
    ("traced", (b": opCount ",), re.compile(rb"NCCL INFO \w{1,30}: opCount "), "NCCL logged every collective"),
)
"""What slows down, text that is found wherever the pattern is (it is searched in a tenth of the time), the pattern, and
what it shows."""


def find_recorder(head: bytes, tail: bytes) -> tuple[Slowed, str] | None:
    """What slowed the run down that wrote ``head`` and ``tail``, if anything, and how that shows."""
    parts = (head,) if head.endswith(tail) else (head, tail)  # of a short log the tail is in the head
    for status, marks, sign, text in _SIGNS:
        if any(_is_in(part, marks, sign) for part in parts):
            return status, f"{text}, which slows a run down"
    return None


def _is_in(text: bytes, marks: tuple[bytes, ...], sign: "re.Pattern[bytes]") -> bool:
    return any(has(text, mark) for mark in marks) and sign.search(text) is not None

# SPDX-License-Identifier: Apache-2.0
"""Lines by which a profiler or NCCL's log shows in a run's log that it slowed the run down."""

import re
from typing import Literal

Slowed = Literal["profiled", "traced"]

_SIGNS: tuple[tuple[Slowed, "re.Pattern[bytes]", str], ...] = (
    (
        "profiled",
        re.compile(rb"Capture range (?:started|ended) in the application\.|Generating '[^'\r\n]{0,200}nsys-report"),
        "Nsight Systems was attached",
    ),
    ("traced", re.compile(rb"NCCL INFO \w{1,30}: opCount "), "NCCL logged every collective"),
)


def find_recorder(head: bytes, tail: bytes) -> tuple[Slowed, str] | None:
    """What slowed the run down that wrote ``head`` and ``tail``, if anything, and how that shows."""
    for status, sign, text in _SIGNS:
        if sign.search(head) or sign.search(tail):
            return status, f"{text}, which slows a run down"
    return None

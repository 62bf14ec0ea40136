# SPDX-License-Identifier: Apache-2.0
"""Formats numbers and other values for people."""

import re

from llmb.runs.identity import Value, value_text
from llmb.shown_text import printable

LONGEST_VALUE = 60
"""Lists of nodes and GPUs can be long."""
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def as_text(value: object) -> str:
    """In one line; empty if unknown."""
    return "" if value is None else printable(value)


def known(value: float | None) -> str:
    """A number; empty if unknown."""
    return "" if value is None else number(value)


def whole(value: int | None) -> str:
    """With separators of thousands; empty if unknown."""
    return "" if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """Four significant digits, integers above 1,000; 'n/a' if unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"


def interval_of(interval: tuple[float, float] | None) -> str:
    """A confidence interval of something that is never negative. One that includes 0 says that hardly anything is
    known; it comes from very few steps, or from steps that differ very much.
    """
    if interval is None:
        return number(None)
    low, high = interval
    return f"{number(low)} to {number(high)}" if low > 0 else unknown("too few steps")


def duration(seconds: float) -> str:
    """In the two largest units, such as ``3 min 14 s`` and ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    sizes = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    place = next(place for place, (size, _) in enumerate(sizes) if whole >= size)
    (size, unit), (small, small_unit) = sizes[place : place + 2]
    return f"{whole // size} {unit} {whole % size // small} {small_unit}"


def shortened(value: Value) -> str:
    """Commits by as many digits as git shows."""
    text = _COMMIT.sub(r"\1", printable(value_text(value)))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."

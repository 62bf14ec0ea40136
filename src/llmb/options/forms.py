# SPDX-License-Identifier: Apache-2.0
"""Text formats of options' values, such as ranges of numbers. Pure."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_PART = r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?"


class Span(NamedTuple):
    """``first`` to ``last``, both inclusive; equal for a single number."""

    first: int
    last: int
    step: int = 1
    width: int = 1
    """Digits of the first number as written, including leading zeros."""

    @property
    def numbers(self) -> range:
        return range(self.first, self.last + 1, self.step)


def parse_ranges(text: str) -> tuple[Span, ...]:
    """Raises ValueError. Ranges are not expanded, because they may be long."""
    return tuple(_span(part) for part in text.split(","))


def numbers_of(spans: Iterable[Span]) -> tuple[int, ...]:
    """Every number of the ranges, in their order."""
    return tuple(number for span in spans for number in span.numbers)


def _span(part: str) -> Span:
    found = re.fullmatch(_PART, part)
    if not found:
        raise ValueError(f"'{part}' is not a number or a range")
    first, last, step = found.groups()
    span = Span(int(first), int(last or first), int(step or 1), len(first))
    if span.last < span.first:
        raise ValueError(f"'{part}' ends before it begins")
    return span


class Form(NamedTuple):
    """``is_written`` returns False, or raises ValueError, for text in another format."""

    is_written: Callable[[str], object]
    valid: str
    """The valid texts, as words after "it must be"."""
    any_case: bool = False
    """Case is ignored, as in the reference suite's scripts."""


def pattern(expression: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(expression, text, re.ASCII | re.IGNORECASE)


TEXT = Form(str.isprintable, "text on one line")
WORD = Form(pattern(r"[\w.+-]+"), "a name", any_case=True)
LABEL = Form(
    pattern(r"(?!(\d+|latest|\d{4}-\d\d-\d\d.*)$)(?!.*\.\.)[a-z0-9][\w.+-]{0,63}"),
    "up to 64 letters, digits, '.', '_', '+' and '-', beginning with a letter or a digit, without '..', and not a"
    " number, a date or 'latest'",
)
"""What could be an id or a time would be taken for it where runs are selected."""
RANKS = Form(parse_ranges, "ranks such as 0 or 0,4-7")

# SPDX-License-Identifier: Apache-2.0
"""Numbers and ranges of them, such as ``0-3,7`` or ``0-15:4``. Pure."""

import re
from collections.abc import Iterable
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

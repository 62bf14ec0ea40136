# SPDX-License-Identifier: Apache-2.0
"""The definition of a log format: how it is recognized, how its steps are numbered, and how they are read."""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from llmb.readers.logs.step_line import StepLine

MAX_LINE_BYTES = 4096
"""Lines longer than this may be skipped."""
NUMBER = rb"-?(?:\d{1,12}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?|nan|inf)"
"""A number as Python and C print it, with a limited number of digits and without a capturing group."""
LINE_ENDS_SOON = rb"(?=[^\r\n]{0,1000}+(?:[\r\n]|\Z))"
"""Matches if the line ends within the next 1000 bytes."""
LEAST_PRINTED_S = 0.01
"""Shorter times, printed in thousandths of a second, have errors above 5 % and are not read."""
NOT_FINITE = (b": nan", b": inf", b": -inf")
"""Python's forms of values that are not finite: faster to find than any pattern."""
_BAD = (*NOT_FINITE, b": NAN", b": INF", b": -INF", b"=nan", b"=inf", b"=-inf")
_BAD_LOSS = re.compile(
    rb"([\w ]{0,12})loss(?![ _]scale)[\w ./()-]{0,40}'?[:=] {0,2}'?(-?(?:nan|inf))(?!\w)", re.IGNORECASE
)
_EVALUATED = b"val"
"""Part of the name of an evaluation loss."""
Value = str | int | float | bool | None

_PREFIX_BYTES = 200
_RANK = re.compile(rb" {0,9}(?:(\d{1,7}): |\[(?:rank|default)?(\d{1,7})\]:? ?)")


class Reader(Protocol):
    """Reads one log. Its methods are called with consecutive parts of the log, in order."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        """Return the steps in ``text[start:end]``, which consists of complete lines; each ends with CR or LF.

        Text that only introduces steps, such as a header with their number, is remembered.
        """

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        """Return the steps in a file's last line, which has no line end, and whether a step line was truncated there.

        The method is called once, at the end, and also returns steps that ``find`` held back.
        """


@dataclass(frozen=True, slots=True)
class Format:
    """A log format. Its patterns must not take quadratic time on any text."""

    name: str
    title: str
    marks: tuple[bytes, ...]
    """Strings, at least one of which occurs in every line that the reader needs up to the first step line. One of the
    first ``step_marks`` occurs in every step line, and one of the others in every match of ``resumed``."""
    step: re.Pattern[bytes]
    """Matches a line that logs a step. The log's format is that of its first step line."""
    reader: Callable[[], Reader]
    first_number: int = 0
    """The number of a run's first step, as printed."""
    mean_of_interval: bool = False
    """True if the step time is the mean over a logged interval of steps, even if lines do not declare ``mean_of``."""
    resumed: re.Pattern[bytes] | None = None
    """Occurs before the first step of a run that resumes from a checkpoint."""
    step_marks: int = 1
    unless: re.Pattern[bytes] | None = None
    """Occurs before the first step of logs whose steps have another format."""

    def find_step_mark(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> int:
        """Return the position of the first step mark in ``text[start:end]``, or -1. No step line ends before it."""
        first = -1
        for mark in self.marks[: self.step_marks]:
            place = text.find(mark, start, end)
            if place >= 0 and (place < first or first < 0):
                first = place
        return first

    def find_last_step_mark(self, text: bytes) -> int:
        return max(text.rfind(mark) for mark in self.marks[: self.step_marks])


def has_any(text: bytes, marks: Iterable[bytes], start: int = 0, end: int = sys.maxsize) -> bool:
    """Return whether one of ``marks`` is in ``text[start:end]``."""
    return any(text.find(mark, start, end) >= 0 for mark in marks)


def rank_before(text: bytes, at: int, start: int = 0) -> int | None:
    """Return the rank in the line's prefix before ``at`` (``3: `` of srun -l, ``[rank3]:`` of torchrun); None if the
    prefix has no rank. ``text[start - 1]`` ends a line.
    """
    if at == start or text[at - 1] in b"\r\n":  # nearly always
        return None
    begin = max(start, at - _PREFIX_BYTES)
    line = max(text.rfind(b"\n", begin, at), text.rfind(b"\r", begin, at), begin - 1) + 1
    match = _RANK.match(text, line, at)
    return int(match[1] or match[2]) if match else None


def moment_before(stamp: re.Pattern[bytes], text: bytes, at: int, start: int = 0) -> float | None:
    """Return the Unix time of the timestamp before ``at`` in its line; None if there is no valid timestamp."""
    match = stamp.search(text, max(start, at - _PREFIX_BYTES), at)
    try:
        return datetime.fromisoformat(match[1].decode().replace(",", ".")).timestamp() if match else None
    except (ValueError, OverflowError):
        return None


def find_bad_loss(text: bytes) -> float | None:
    """Return a non-finite training loss in a line, whatever its name; None if all are finite."""
    losses = _BAD_LOSS.findall(text) if has_any(text, _BAD) else ()
    return next((float(value) for before, value in losses if _EVALUATED not in before.lower()), None)


def number_or_none(text: bytes | None) -> float | None:
    """Convert text that matches ``NUMBER``, with or without thousands separators; return None for None."""
    return float(text.replace(b",", b"")) if text else None

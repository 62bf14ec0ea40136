# SPDX-License-Identifier: Apache-2.0
"""Recognizes text in which each line is the next step, for the cost of a search instead of a parse."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmb.logs.formats.format import NOT_FINITE, has, has_any
from llmb.logs.formats.nemo2 import (
    GBS_FIELD,
    GLOBAL_STEP_FIELD,
    LOSS_FIELD,
    MAX_BODY_BYTES,
    SAMPLES,
    STEP_TIME_FIELD,
    TFLOPS_FIELD,
    are_regular,
    find_steps,
)
from llmb.logs.step_line import STEP_LINE_HEAD, StepLine

_HEAD = re.compile(rb"[^|\r\n]*%s\d{1,9}, iteration (\d{1,9})/\d{1,9} \|" % STEP_LINE_HEAD)
_BAR, _ZERO, _SPACE, _POINT = b"|0 ."
_VALUE_BYTES = 8  # fits in a NumPy integer
_ALL = slice(None)
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Lines of all steps from ``first`` to ``final``, in order and once each, that declare the same last step."""

    first: StepLine
    final: StepLine
    text: bytes
    bars: Indices
    """Offsets in ``text`` at which the fields of each line begin: lines x fields."""
    line_ends: Indices
    """Offset of the end of the line before the first, then of each line."""
    fields: dict[bytes, int]
    """Column numbers of the fields that are read."""

    @property
    def count(self) -> int:
        return self.final.step - self.first.step + 1

    @property
    def numbers(self) -> Indices:
        return np.arange(self.first.step, self.final.step + 1)

    @property
    def bodies(self) -> tuple[bytes, bytes]:
        """The fields of the first and of the final line."""
        first, final = (int(self.bars[line, 0]) + 1 for line in (0, -1))
        return self.text[first : int(self.line_ends[1])], self.text[final : int(self.line_ends[-1])]

    def column(self, name: bytes, inside: slice = _ALL) -> NDArray[np.float64] | None:
        """The values of a field in the lines ``inside``, nan if they do not have it. None if they have to be read line
        by line."""
        found = self._column(name)
        return None if found is None else found[inside]

    def _column(self, name: bytes) -> NDArray[np.float64] | None:
        if name not in self.fields:
            return None if name in self.text else np.full(self.count, math.nan)
        column = self.fields[name]
        starts = self.bars[:, column] + 1 + len(name)
        ends = self.bars[:, column + 1] if column + 1 < self.bars.shape[1] else self.line_ends[1:]
        lengths = ends - starts
        if lengths.max() > _VALUE_BYTES or starts[-1] + _VALUE_BYTES > len(self.text):
            return None
        if (decimals := _decimals(_gather(self.text, starts, int(lengths[0])), lengths)) is not None:
            return decimals
        rows = _gather(self.text, starts, _VALUE_BYTES)
        rows[np.arange(_VALUE_BYTES) >= lengths[:, np.newaxis]] = _SPACE
        words, places = np.unique(rows.view(np.uint64), return_inverse=True)  # few of the values differ
        try:
            return np.array([float(word) for word in words.view(f"S{_VALUE_BYTES}")])[places.ravel()]
        except ValueError:
            return None


def _decimals(rows: NDArray[np.uint8], lengths: Indices) -> NDArray[np.float64] | None:
    """The numbers in ``rows`` if all are alike, such as 2.719 and 2.691; None if they are not.

    An integer over a power of ten is rounded as the decimal is: both are exact as floats.
    """
    if (lengths != lengths[0]).any():
        return None
    body = rows[:, :-1] if (rows[:, -1] == _SPACE).all() else rows
    point = body[0].tobytes().find(b".")
    if point < 0 or (body[:, point] != _POINT).any():
        return None
    digits = body - _ZERO
    digits[:, point] = 0
    if digits.max() > 9:
        return None
    places = digits.shape[1]
    numbers = np.zeros(len(digits))
    for place in (*range(point), *range(point + 1, places)):
        numbers = 10 * numbers + digits[:, place]
    numbers /= 10.0 ** (places - 1 - point)
    return numbers


def find_block(text: bytes, start: int, end: int) -> StepBlock | None:
    """Returns the complete lines ``text[start:end]`` as a block if they form one; ``text[start - 1]`` ends a line.

    Every line must have as many fields as the first, and the fields that are read must be in the same columns. A
    value must begin with a digit, which excludes nan and infinity; it is then assumed to be a number.
    """
    first_line = text[start : text.find(b"\n", start, end) + 1]
    head = _HEAD.match(first_line)
    if not head:
        return None
    first = _only_step(first_line)
    final = _only_step(text[text.rfind(b"\n", start, end - 1) + 1 : end])
    if first is None or final is None or first.step != int(head[1]) or first.last != final.last:
        return None  # such as in a later epoch, whose iterations are not the steps
    count = final.step - first.step + 1
    fields = first_line.split(b"|")[1:]
    characters = np.frombuffer(text, np.uint8, end - start, start)
    found = np.flatnonzero(characters == _BAR) + start
    if len(found) != count * len(fields) or np.count_nonzero(characters < _SPACE) != count:
        return None
    bars = found.reshape(count, len(fields))
    line_ends = np.append(bars[:, 0] - head.end(), end - 1)
    numbers = _numbers(text, line_ends, head, first.step)
    if numbers is None:
        return None
    columns = {}
    for name in (STEP_TIME_FIELD, LOSS_FIELD, TFLOPS_FIELD)[: 2 if first.tflops_per_gpu is None else 3]:
        column = next((i for i, field in enumerate(fields) if field.startswith(name)), None)
        if column is None or not _have_field(text, bars[:, column] + 1, name):
            return None
        columns[name] = column
    column = next((i for i, field in enumerate(fields) if field.startswith(GLOBAL_STEP_FIELD)), None)
    if column is None:
        has_steps = text.find(GLOBAL_STEP_FIELD, start, end) < 0
    else:
        has_steps = _have_global_steps(text, bars[:, column] + 1, numbers)
    block = StepBlock(first, final, text, bars, line_ends, columns)
    return block if has_steps and _is_of_one_batch(block, fields) and _has_no_other_loss(block, fields) else None


def _has_no_other_loss(block: StepBlock, fields: Sequence[bytes]) -> bool:
    """Whether all losses that a field with another name may have are finite."""
    if not any(b"loss" in field and not field.startswith(LOSS_FIELD) for field in fields):
        return True
    return not has_any(block.text, NOT_FINITE, int(block.line_ends[0]), int(block.line_ends[-1]))


def _is_of_one_batch(block: StepBlock, fields: Sequence[bytes]) -> bool:
    """Whether all lines have the batch size of the first, or if it has none, whether each step consumed as many
    samples."""
    text, start, end = block.text, int(block.line_ends[0]), int(block.line_ends[-1])
    column = next((i for i, field in enumerate(fields) if field.startswith(GBS_FIELD)), None)
    if column is not None:
        places, width = block.bars[:, column] + 1, len(fields[column])
        return places[-1] + width < len(text) and _are_all(_gather(text, places, width), fields[column])
    if has(text, GBS_FIELD, start, end):
        return False
    return are_regular([int(samples) for samples in SAMPLES.findall(text, start, end)])


def _only_step(line: bytes) -> StepLine | None:
    """None for a line that another one runs into: of its fields those of the other would count."""
    steps = list(find_steps(line)) if line.count(STEP_LINE_HEAD) == 1 else []
    return steps[0] if len(steps) == 1 else None


def _numbers(text: bytes, line_ends: Indices, head: "re.Match[bytes]", step: int) -> NDArray[np.uint8] | None:
    """The digits of the lines' iterations: lines x digits.

    None unless each line end but the last is followed by a head like ``head``, numbered from ``step``.
    """
    if np.diff(line_ends).max() > 1 + head.end() + MAX_BODY_BYTES:
        return None
    number, after = 1 + head.start(1), 1 + head.end(1)
    heads = _gather(text, line_ends[:-1], 1 + head.end())
    digits = heads[:, number:after] - _ZERO
    numbers = digits @ 10 ** np.arange(after - number)[::-1]
    if (digits > 9).any() or not np.array_equal(numbers, np.arange(step, step + len(digits))):
        return None
    heads[:, number:after] = _ZERO
    return digits if _are_all(heads, heads[0].tobytes()) else None


def _have_global_steps(text: bytes, places: Indices, numbers: NDArray[np.uint8]) -> bool:
    """Whether the field at each of ``places`` is the global step, and equal to the line's iteration."""
    start, width = len(GLOBAL_STEP_FIELD), numbers.shape[1]
    end = start + width
    if places[-1] + end >= len(text):
        return False
    found = _gather(text, places, end + 1)
    if not np.array_equal(found[:, start:end] - _ZERO, numbers):
        return False
    found[:, start:end] = _ZERO
    return _are_all(found, GLOBAL_STEP_FIELD + b"0" * width + b" ")


def _have_field(text: bytes, places: Indices, name: bytes) -> bool:
    """Whether ``name`` followed by a digit is found at all ``places``."""
    if places[-1] + len(name) >= len(text):
        return False
    found = _gather(text, places, len(name) + 1)
    digits = found[:, -1] - _ZERO
    found[:, -1] = _ZERO
    return bool((digits <= 9).all()) and _are_all(found, name + b"0")


def _are_all(rows: NDArray[np.uint8], row: bytes) -> bool:
    return rows.tobytes() == row * len(rows)


def _gather(text: bytes, places: Indices, width: int) -> NDArray[np.uint8]:
    """``width`` bytes from each place, one row per place."""
    windows: NDArray[Any] = np.ndarray(len(text) - width + 1, f"V{width}", text, strides=(1,))
    return windows[places].view(np.uint8).reshape(len(places), width)

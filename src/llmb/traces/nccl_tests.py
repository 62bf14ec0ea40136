# SPDX-License-Identifier: Apache-2.0
"""Reads the tables that nccl-tests print since 2.16.7, by their column headers.

Lines may have a label of the program that started the test: ``0: `` of ``srun --label``, ``[1,0]<stdout>:`` of mpirun.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from llmb.errors import UsageError
from llmb.input_files import open_file

LONGEST_LINE = 4096
CHUNK_BYTES = 1 << 20
HEADER_WORD = "busbw"
NCCL_LINE = "NCCL INFO"
MOST_LABELS = 10_000
_LABEL = re.compile(r"\s*([^\s#]{1,200}:)(?=[\s#])\s*")
_HEAD = re.compile(r"#\s*(?:Collective test|nThread \d|Using devices|Rank\s+\d|size\s+count\s)")
"""A line above a table, or the last one below it."""
_NAME = re.compile(r"# Collective test starting: (\w+)_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s")
_CYCLE = re.compile(r"#\s*Testing \d+ cycle")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)")
_ROW_NAMES = ["size", "count", "type", "redop", "root"]
_FIGURES = {
    "time": "time_us",
    "cputime": "time_us",
    "algbw": "algorithm_gb_s",
    "busbw": "bus_gb_s",
    "#wrong": "wrong",
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Results out of place or in place. What was not measured is None."""

    time_us: float | None
    algorithm_gb_s: float | None
    bus_gb_s: float | None
    wrong: float | None
    """Wrong results."""
    not_finite: dict[str, str] = field(default_factory=dict)
    """What was printed in place of a number, such as ``inf``, by the field that is None for it."""


@dataclass(frozen=True, slots=True)
class TestRow:
    """One line of a table. ``reduction`` and ``root`` are None if the collective has none."""

    __test__ = False  # not one of pytest's

    size_bytes: int
    count: int
    datatype: str
    reduction: str | None
    root: int | None
    out_of_place: Bandwidth | None
    """None if every column is ``N/A``."""
    in_place: Bandwidth | None


@dataclass(frozen=True, slots=True)
class TestTable:
    """One run of one test."""

    __test__ = False

    source: str
    name: str | None
    """Such as ``all_reduce``; None if the output does not name it."""
    ranks: int | None
    rows: tuple[TestRow, ...]
    average_bus_gb_s: float | None = None
    not_finite: dict[str, str] = field(default_factory=dict)


def read_test_tables(path: Path, source: str | None = None) -> list[TestTable]:
    """Every table of the file; empty if there is none. ``source`` is the name of the file in the tables.

    Raises UsageError if the file cannot be read.
    """
    with open_file(path) as stream:
        try:
            if not _has_header(stream):
                return []
            stream.seek(0)
            with io.TextIOWrapper(io.BufferedReader(cast(io.RawIOBase, stream)), "utf-8", "replace") as text:
                return list(_tables(source or path.name, iter(lambda: text.readline(LONGEST_LINE), "")))
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _has_header(stream: BinaryIO) -> bool:
    """Whether the file may contain a table: parsing each line of a large log takes far longer."""
    rest = b""
    while chunk := stream.read(CHUNK_BYTES):
        if HEADER_WORD.encode() in rest + chunk:
            return True
        rest = chunk[-len(HEADER_WORD) :]
    return False


@dataclass(slots=True)
class _Output:
    """What was read of the table that has not ended."""

    source: str
    name: str | None = None
    ranks: set[int] = field(default_factory=set)
    columns: tuple[str, ...] = ()
    """Names of the columns of results out of place; those in place are the same. Empty above the table."""
    rows: list[TestRow] = field(default_factory=list)
    cycles: bool = False
    """The test was repeated, and the average at its end is that of all cycles."""

    def read(self, line: str) -> TestTable | None:
        """The table that ends with ``line`` or before it, if one does."""
        if not line.startswith("#"):
            if row := _row(self.columns, line):
                self.rows.append(row)
            return None
        if average := _AVERAGE.match(line):
            return self.end(None if self.cycles else average[1])
        if _CYCLE.match(line):
            return self._repeat()
        ended = self.end() if self.rows and _HEAD.match(line) else None
        if named := _NAME.match(line):
            self.name = named[1]
        elif rank := _RANK.match(line):
            self.ranks.add(int(rank[1]))
        elif HEADER_WORD in line:
            self.columns = _columns(line)
        return ended

    def _repeat(self) -> TestTable | None:
        name, ranks, columns = self.name, self.ranks, self.columns
        ended = self.end()
        self.name, self.ranks, self.columns, self.cycles = name, ranks, columns, True
        return ended

    def end(self, average: str | None = None) -> TestTable | None:
        """What was read, None without a row; then nothing is read yet of the next table."""
        rows, ranks, name = tuple(self.rows), len(self.ranks) or None, self.name
        self.name, self.ranks, self.columns, self.rows, self.cycles = None, set(), (), [], False
        if not rows:
            return None
        try:
            value, odd = (None, None) if average is None else _number(average)
        except ValueError:
            value, odd = None, average
        return TestTable(self.source, name, ranks, rows, value, {"average_bus_gb_s": odd} if odd else {})


def _tables(source: str, lines: Iterable[str]) -> Iterator[TestTable]:
    outputs = {"": _Output(source)}
    for line in lines:
        labeled = None if NCCL_LINE in line else _LABEL.match(line)
        label, text = (labeled[1], line[labeled.end() :]) if labeled else ("", line)
        if label not in outputs and text.startswith("#") and len(outputs) < MOST_LABELS:
            outputs[label] = _Output(source)
        if (output := outputs.get(label)) and (table := output.read(text)):
            yield table
    for output in outputs.values():
        if table := output.end():
            yield table


def _columns(header: str) -> tuple[str, ...]:
    """The columns of the results out of place; empty for another line than a header."""
    words = header.removeprefix("#").split()
    figures = words[len(_ROW_NAMES) :]
    columns = tuple(figures[: len(figures) // 2])
    return columns if words[: len(_ROW_NAMES)] == _ROW_NAMES and {"algbw", "busbw"} <= set(columns) else ()


def _row(columns: tuple[str, ...], line: str) -> TestRow | None:
    """None for another line than a row; what follows the columns, such as a time, is not read."""
    words, first, width = line.split(), len(_ROW_NAMES), len(columns)
    if not columns or len(words) < first + 2 * width:
        return None
    size, count, datatype, reduction, root = words[:first]
    try:
        return TestRow(
            size_bytes=int(size),
            count=int(count),
            datatype=datatype,
            reduction=None if reduction == "none" else reduction,
            root=int(root) if int(root) >= 0 else None,
            out_of_place=_bandwidth(columns, words[first : first + width]),
            in_place=_bandwidth(columns, words[first + width : first + 2 * width]),
        )
    except ValueError:
        return None


def _bandwidth(columns: tuple[str, ...], words: list[str]) -> Bandwidth | None:
    """None if every word is ``N/A``. Raises ValueError for another word than a number."""
    if set(words) == {"N/A"}:
        return None
    values: dict[str, float | None] = dict.fromkeys(_FIGURES.values())
    not_finite = {}
    for column, word in zip(columns, words, strict=True):
        name = _FIGURES.get(column)
        if name is None or word == "N/A":
            continue
        values[name], odd = _number(word)
        if odd:
            not_finite[name] = odd
    return Bandwidth(**values, not_finite=not_finite)


def _number(word: str) -> tuple[float | None, str | None]:
    """The value, or for one that is not finite its text. Raises ValueError for what is not a number."""
    value = float(word)
    return (value, None) if math.isfinite(value) else (None, word)


def same_tests(tests: Iterable[TestTable]) -> list[list[TestTable]]:
    """Groups of tables of the same test in different files, which can be compared."""
    groups: list[list[TestTable]] = []
    for test in tests:
        fits = (
            group
            for group in groups
            if test.name and group[0].name == test.name and test.source not in {one.source for one in group}
        )
        if group := next(fits, None):
            group.append(test)
        else:
            groups.append([test])
    return groups

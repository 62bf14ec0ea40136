# SPDX-License-Identifier: Apache-2.0
"""Reads the tables that nccl-tests and rccl-tests print, by their column headers.

Lines may have a label of the program that started the test: ``0: `` of ``srun --label``, ``[1,0]<stdout>:`` of mpirun.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

from llmb.errors import UsageError
from llmb.input_files import open_file

LONGEST_LINE = 4096
CHUNK_BYTES = 1 << 20
HEADER_WORD = "busbw"
NCCL_LINE = "NCCL INFO"
MOST_LABELS = 10_000
FACTOR_TOLERANCE = 0.05
"""Bandwidths are printed with two decimals."""
_LABEL = re.compile(r"\s*([^\s#]{1,200}:)(?=[\s#])")
_NAMED = re.compile(r"\b(\w+)_perf\b")
_CONCLUDED = "test concluded"
_BEGINS = re.compile(r"#.*(?:test starting|nThread \d|Using devices|in-place)")
_CYCLE = re.compile(r"#\s*Testing \d+ cycle")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*")
_WHOLE = re.compile(r"[0-9]{1,18}")
_ROOT = re.compile(r"-?[0-9]{1,9}")
_TIMES = ("time", "cputime")
_WRONG = ("#wrong", "error")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Results out of place or in place. What was not measured is None."""

    time_us: float | None
    algorithm_gb_s: float | None
    bus_gb_s: float | None
    wrong: float | None
    """Wrong results (before nccl-tests 2.12: the largest error)."""
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
    """None if the test ran in place alone."""
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


@dataclass(frozen=True, slots=True)
class _Header:
    """The columns of a table: those that name the row, then those of the results out of place and in place."""

    names: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]
    in_place_alone: bool


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
    """The lines of one label."""

    source: str
    name: str | None = None
    ranks: set[int] = field(default_factory=set)
    header: _Header | None = None
    rows: list[TestRow] = field(default_factory=list)
    in_place_alone: bool = False
    """The line above the header says so."""
    cycles: bool = False
    """The test was repeated, and the average at its end is that of all cycles."""

    def read(self, line: str) -> TestTable | None:
        """The table that ends with ``line`` or before it, if one does."""
        if self.header is None:
            self._read_head(line)
        elif average := _AVERAGE.search(line):
            return self.table(None if self.cycles else average[1])
        elif NCCL_LINE in line:
            return None
        elif "#" in line:
            return self._read_comment(line, self.header)
        elif row := _row(self.header, line):
            return self._add(row, self.header)
        return None

    def _read_comment(self, line: str, header: _Header) -> TestTable | None:
        """The last line of a table is missing if the first lines of another follow."""
        if _CYCLE.search(line):
            return self._again(header)
        begins = _BEGINS.search(line) or _RANK.search(line) or _header(line, in_place_alone=False)
        if not begins and _CONCLUDED not in line:
            return None
        ended = self.table()
        self._read_head(line)
        return ended

    def _add(self, row: TestRow, header: _Header) -> TestTable | None:
        """Sizes grow for each type, reduction and root: smaller ones are of another test, whose first lines are
        missing, and with them its name."""
        before = self.rows[-1] if self.rows else row
        same = (before.datatype, before.reduction, before.root) == (row.datatype, row.reduction, row.root)
        ended = None
        if same and row.size_bytes < before.size_bytes:
            ended, self.header = self.table(), header
        self.rows.append(row)
        return ended

    def _again(self, header: _Header) -> TestTable | None:
        name, ranks = self.name, self.ranks
        ended = self.table()
        self.name, self.ranks, self.header, self.cycles = name, ranks, header, True
        return ended

    def _read_head(self, line: str) -> None:
        if _CONCLUDED in line:
            return
        if "_perf" in line and (named := _NAMED.search(line)):
            self.name = named[1]
        elif " Pid " in line and (rank := _RANK.search(line)):
            self.ranks.add(int(rank[1]))
        elif "in-place" in line:
            self.in_place_alone = "out-of-place" not in line
        elif HEADER_WORD in line:
            self.header = _header(line, in_place_alone=self.in_place_alone)

    def table(self, average: str | None = None) -> TestTable | None:
        """What was read, None without a row; then nothing is read yet of the next table."""
        rows, ranks, name = tuple(self.rows), len(self.ranks) or None, self.name
        self.name, self.ranks, self.header, self.rows, self.cycles = None, set(), None, [], False
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
        labeled = _LABEL.match(line)
        label = labeled[1] if labeled and NCCL_LINE not in line else ""
        if "#" in line and len(outputs) < MOST_LABELS:
            output: _Output | None = outputs.setdefault(label, _Output(source))
        else:
            output = outputs.get(label)
        if output and (table := output.read(line[labeled.end() :] if labeled and label else line)):
            yield _named(table, outputs[""].name)
    name = outputs[""].name
    for output in outputs.values():
        if table := output.table():
            yield _named(table, name)


def _named(table: TestTable, command: str | None) -> TestTable:
    """A shell may have written the command without the label of its output."""
    return table if table.name else replace(table, name=command)


def _header(line: str, *, in_place_alone: bool) -> _Header | None:
    """The columns that a header line names; None for any other line."""
    words = line.partition("#")[2].split()
    if words[:3] != ["size", "count", "type"] or HEADER_WORD not in words:
        return None
    starts = [i for i, word in enumerate(words) if word in _TIMES]
    if not starts:
        return None
    second = starts[1] if len(starts) > 1 else len(words)
    width = second - starts[0]
    columns = tuple(words[starts[0] : second]), tuple(words[second : second + width])
    return _Header(tuple(words[: starts[0]]), *columns, in_place_alone and not columns[1])


def _row(header: _Header, line: str) -> TestRow | None:
    words = line.split()
    for size in (1, 2):
        if _STAMP.fullmatch(" ".join(words[-size:])):
            words = words[:-size]
            break
    width = len(header.first) + len(header.second)
    middle = words[3 : len(words) - width]
    if len(words) < 3 + width or len(middle) > len(header.names) - 3 or not all(map(_WHOLE.fullmatch, words[:2])):
        return None
    values = words[len(words) - width :]
    first = _bandwidth(header.first, values)
    if first is None:
        return None
    roots = [int(word) for word in middle if _ROOT.fullmatch(word)]
    names = [word for word in middle if not _ROOT.fullmatch(word) and word != "none"]
    return TestRow(
        size_bytes=int(words[0]),
        count=int(words[1]),
        datatype=words[2],
        reduction=names[0] if names else None,
        root=roots[0] if roots and roots[0] >= 0 else None,
        out_of_place=None if header.in_place_alone else _measured(first),
        in_place=_measured(first if header.in_place_alone else _bandwidth(header.second, values[len(header.first) :])),
    )


def _measured(way: Bandwidth | None) -> Bandwidth | None:
    """None also if every column is ``N/A``."""
    return None if way == Bandwidth(None, None, None, None) else way


def _bandwidth(columns: Sequence[str], words: Sequence[str]) -> Bandwidth | None:
    """None if there are no such columns, or if one holds neither a number nor ``N/A``."""
    try:
        read = {
            name: (None, None) if word == "N/A" else _number(word) for name, word in zip(columns, words, strict=False)
        }
    except ValueError:
        return None
    if not read:
        return None
    found = {
        "time_us": next(read[name] for name in _TIMES if name in read),
        "algorithm_gb_s": read.get("algbw", (None, None)),
        "bus_gb_s": read.get("busbw", (None, None)),
        "wrong": next((read[name] for name in _WRONG if name in read), (None, None)),
    }
    values = {name: value for name, (value, _) in found.items()}
    return Bandwidth(**values, not_finite={name: odd for name, (_, odd) in found.items() if odd})


def _number(word: str) -> tuple[float | None, str | None]:
    """The value, or for one that is not finite its text. Raises ValueError for what is not a number."""
    value = float(word)
    return (value, None) if math.isfinite(value) else (None, word)


def same_tests(tests: Iterable[TestTable]) -> list[list[TestTable]]:
    """Groups of tables of the same test in different files, which can be compared."""
    groups: list[list[TestTable]] = []
    for test in tests:
        fits = (
            group for group in groups if _is_same_test(group[0], test) and test.source not in {x.source for x in group}
        )
        if group := next(fits, None):
            group.append(test)
        else:
            groups.append([test])
    return groups


def _is_same_test(one: TestTable, other: TestTable) -> bool:
    """By their names. Without names, what differs between collectives has to be equal."""
    if one.name or other.name:
        return one.name == other.name
    kinds = [{(row.reduction is None, row.root is None) for row in test.rows} for test in (one, other)]
    factors = [_bus_factor(test) for test in (one, other)]
    known = [factor for factor in factors if factor]
    return kinds[0] == kinds[1] and (len(known) < 2 or abs(known[0] / known[1] - 1) < FACTOR_TOLERANCE)


def _bus_factor(test: TestTable) -> float | None:
    """Bus bandwidth over algorithm bandwidth, which the collective and the number of ranks determine."""
    ways = [way for row in test.rows for way in (row.out_of_place, row.in_place) if way]
    best = max(ways, key=lambda way: way.algorithm_gb_s or 0)
    return best.bus_gb_s / best.algorithm_gb_s if best.bus_gb_s and best.algorithm_gb_s else None

# SPDX-License-Identifier: Apache-2.0
"""Reads the tables that nccl-tests print, by their column headers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.errors import UsageError

LONGEST_LINE = 4096
CHUNK_BYTES = 1 << 20
HEADER_WORD = "busbw"
NCCL_LINE = "NCCL INFO"
_NAMED = re.compile(r"(\w+)_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.eE+-]+)")
_STAMP = re.compile(r"\s+\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s*$")
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


@dataclass(frozen=True, slots=True)
class TestRow:
    """One line of a table. ``reduction`` and ``root`` are None if the collective has none."""

    __test__ = False  # not one of pytest's

    size_bytes: int
    count: int
    datatype: str
    reduction: str | None
    root: int | None
    out_of_place: Bandwidth
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


@dataclass(frozen=True, slots=True)
class _Header:
    """The columns of a table: those that name the row, then those of the results out of place and in place."""

    names: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]


def read_test_tables(path: Path) -> list[TestTable]:
    """Every table of the file; empty if there is none. Raises UsageError if the file cannot be read."""
    try:
        if not _has_header(path):
            return []
        with path.open(encoding="utf-8", errors="replace") as stream:
            return list(_tables(path.name, iter(lambda: stream.readline(LONGEST_LINE), "")))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _has_header(path: Path) -> bool:
    """Whether the file may contain a table: parsing each line of a large log takes far longer."""
    rest = b""
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            if HEADER_WORD.encode() in rest + chunk:
                return True
            rest = chunk[-len(HEADER_WORD) :]
    return False


def _tables(source: str, lines: Iterable[str]) -> Iterator[TestTable]:
    name: str | None = None
    ranks: set[int] = set()
    header: _Header | None = None
    rows: list[TestRow] = []
    for line in lines:
        if header:
            row = None if NCCL_LINE in line else _row(header, line)
            average = _AVERAGE.search(line)
            if row:
                rows.append(row)
            if average and rows:
                yield TestTable(source, name, len(ranks) or None, tuple(rows), float(average[1]))
                name, ranks, header, rows = None, set(), None, []
            continue
        if "_perf" in line and (named := _NAMED.search(line)):
            name = named[1]
        elif " Pid " in line and (rank := _RANK.search(line)):
            ranks.add(int(rank[1]))
        elif HEADER_WORD in line:
            header = _header(line)
    if rows:
        yield TestTable(source, name, len(ranks) or None, tuple(rows))


def _header(line: str) -> _Header | None:
    """The columns that a header line names; None for any other line. mpirun may have added a prefix."""
    words = line.partition("#")[2].split()
    if words[:3] != ["size", "count", "type"] or HEADER_WORD not in words:
        return None
    starts = [i for i, word in enumerate(words) if word in _TIMES]
    if not starts:
        return None
    second = starts[1] if len(starts) > 1 else len(words)
    width = second - starts[0]
    return _Header(tuple(words[: starts[0]]), tuple(words[starts[0] : second]), tuple(words[second : second + width]))


def _row(header: _Header, line: str) -> TestRow | None:
    words = _STAMP.sub("", line.rpartition(">:")[2]).split()
    width = len(header.first) + len(header.second)
    middle = words[3 : len(words) - width]
    if len(words) < 3 + width or len(middle) > len(header.names) - 3 or not (words[0] + words[1]).isdigit():
        return None
    values = words[len(words) - width :]
    first = _bandwidth(header.first, values)
    if first is None:
        return None
    roots = [int(word) for word in middle if word.lstrip("-").isdigit()]
    names = [word for word in middle if not word.lstrip("-").isdigit() and word != "none"]
    return TestRow(
        size_bytes=int(words[0]),
        count=int(words[1]),
        datatype=words[2],
        reduction=names[0] if names else None,
        root=roots[0] if roots and roots[0] >= 0 else None,
        out_of_place=first,
        in_place=_bandwidth(header.second, values[len(header.first) :]),
    )


def _bandwidth(columns: Sequence[str], words: Sequence[str]) -> Bandwidth | None:
    """None if there are no such columns, or if one holds neither a number nor ``N/A``."""
    try:
        values = {name: None if word == "N/A" else float(word) for name, word in zip(columns, words, strict=False)}
    except ValueError:
        return None
    if not values:
        return None
    time = next(values[name] for name in _TIMES if name in values)
    wrong = next((values[name] for name in _WRONG if name in values), None)
    return Bandwidth(time, values.get("algbw"), values.get("busbw"), wrong)

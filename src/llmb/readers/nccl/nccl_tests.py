# SPDX-License-Identifier: Apache-2.0
"""Reads tables of nccl-tests and rccl-tests by column headers, with or without labels such as mpirun's, and nccl-tests'
JSON.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import BinaryIO, cast

from pydantic import BaseModel, ValidationError

from llmb.base.errors import UsageError
from llmb.base.input_files import open_file

LONGEST_LINE = 4096
CHUNK_BYTES = 1 << 20
HEADER_WORD = "busbw"
HEAD_BYTES = 1 << 16
MOST_JSON_BYTES = 1 << 26
NCCL_LINE = "NCCL INFO"
MOST_LABELS = 10_000
_LABEL = re.compile(r"\s*([^\s#]{1,200}:)(?=[\s#])[ \t]?")
_HEAD = re.compile(r"#\s*(?:Collective test|nThread \d|Using devices|Rank\s+\d|size\s+count\s)")
"""The beginning of a line above a table."""
_NAME = re.compile(r"\b(\w{1,40}?)_perf(?:_mpi)?\b")
"""A test's name in a line above a table."""
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s")
_CYCLE = re.compile(r"#\s*Testing \d+ cycle")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(\S+)")
_CONCLUDED = "test concluded"
_WORD = re.compile(r"\S+")
_INTEGER = re.compile(r"-?\d{1,9}")
_ROW_NAMES = ("size", "count", "type")
_TIMES = ("time", "cputime")
_FIGURES = {
    "time": "time_us",
    "cputime": "cpu_time_us",
    "algbw": "algorithm_gb_s",
    "busbw": "bus_gb_s",
    "#wrong": "wrong",
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The results of one row, either out of place or in place. Unmeasured values are None."""

    time_us: float | None
    algorithm_gb_s: float | None
    bus_gb_s: float | None
    wrong: float | None
    """Number of wrong results."""
    cpu_time_us: float | None = None
    """CPU time of the host (with ``-C 1``), from which the bandwidths are then computed."""
    not_finite: dict[str, str] = field(default_factory=dict)
    """The text printed instead of a number, such as ``inf``, by field name."""


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
    """None if the row has no results out of place."""
    in_place: Bandwidth | None


@dataclass(frozen=True, slots=True)
class TestTable:
    __test__ = False

    source: str
    name: str | None
    """For example ``all_reduce``; None if the output does not name it."""
    ranks: int | None
    rows: tuple[TestRow, ...]
    average_bus_gb_s: float | None = None
    not_finite: dict[str, str] = field(default_factory=dict)
    contradiction: str | None = None
    """Description of figures in the table that contradict each other."""

    @property
    def ways(self) -> Iterator[Bandwidth]:
        return (way for row in self.rows for way in (row.out_of_place, row.in_place) if way)

    @property
    def is_of_cpu_time(self) -> bool:
        return any(way.cpu_time_us is not None for way in self.ways)


@dataclass(frozen=True, slots=True)
class _Header:
    names: tuple[str, ...]
    """Columns that identify the row."""
    figures: tuple[str, ...]
    """Columns of the out-of-place results, and equally of the in-place results."""
    out_of_place_end: int
    """The position in the line after the last out-of-place column; 0 if the test ran only in place."""


def read_test_tables(path: Path, source: str | None = None) -> list[TestTable]:
    """Return the file's tables, with ``source`` instead of the file's name.

    Raise UsageError if it is unreadable or invalid JSON.
    """
    with open_file(path) as stream:
        try:
            if is_test_json(head := stream.read(HEAD_BYTES)):
                return [_checked(_json_table(source or path.name, head + stream.read(MOST_JSON_BYTES), str(path)))]
            stream.seek(0)
            if not _has_header(stream):
                return []
            stream.seek(0)
            with io.TextIOWrapper(io.BufferedReader(cast(io.RawIOBase, stream)), "utf-8", "replace") as text:
                return list(map(_checked, _tables(source or path.name, iter(lambda: text.readline(LONGEST_LINE), ""))))
        except OSError as error:
            raise UsageError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _checked(table: TestTable) -> TestTable:
    """Return the table with its first contradiction; 1/2.2 allows for ``hypercube_perf``, which counts fewer bytes than
    it prints.
    """
    average, buses = table.average_bus_gb_s, [way.bus_gb_s for way in table.ways if way.bus_gb_s is not None]
    problems = (
        f"{row.size_bytes:,} bytes in {time_us:g} us are {rate:.4g} GB/s, not {way.algorithm_gb_s:g}"
        for row in table.rows
        for way in filter(None, (row.out_of_place, row.in_place))
        if way.algorithm_gb_s is not None and (time_us := way.time_us or way.cpu_time_us)
        if not (rate := row.size_bytes / time_us / 1000) / 2.2 < way.algorithm_gb_s + 0.01 < 1.1 * rate + 0.03
    )
    problem = next(problems, None)
    if not problem and buses and average and abs(average - fmean(buses)) > 0.1 * average + 0.01:
        problem = f"the average of the rows is {fmean(buses):.4g} GB/s, not {average:g}"
    return replace(table, contradiction=problem)


def _has_header(stream: BinaryIO) -> bool:
    """Search for a header: parsing each line of a large log would take far longer."""
    rest = b""
    while chunk := stream.read(CHUNK_BYTES):
        if HEADER_WORD.encode() in rest + chunk:
            return True
        rest = chunk[-len(HEADER_WORD) :]
    return False


@dataclass(slots=True)
class _Output:
    """The unfinished table of one output, with its rows so far."""

    source: str
    name: str | None = None
    ranks: set[int] = field(default_factory=set)
    header: _Header | None = None
    """None above the table."""
    rows: list[TestRow] = field(default_factory=list)
    in_place_alone: bool = False
    """True if the line above the header announces only in-place results."""
    cycles: bool = False
    """True if the test was repeated, so that its final average covers all cycles."""

    def read(self, line: str) -> TestTable | None:
        """Read the next line; return the table that ends with it or before it, if any."""
        if not line.startswith("#"):
            if self.header and (row := _row(self.header, line)):
                self.rows.append(row)
            elif not self.header and NCCL_LINE not in line and (match := _NAME.search(line)):
                self.name = match[1]
            return None
        if average := _AVERAGE.match(line):
            return self.end(None if self.cycles else average[1])
        if _CYCLE.match(line):
            return self._repeat()
        ended = self.end() if self.rows and _HEAD.match(line) else None
        if rank := _RANK.match(line):
            self.ranks.add(int(rank[1]))
        elif "in-place" in line:
            self.in_place_alone = "out-of-place" not in line
        elif HEADER_WORD in line:
            self.header = _header(line, in_place_alone=self.in_place_alone)
        elif _CONCLUDED not in line and (match := _NAME.search(line)):
            self.name = match[1]
        return ended

    def _repeat(self) -> TestTable | None:
        name, ranks, header = self.name, self.ranks, self.header
        ended = self.end()
        self.name, self.ranks, self.header, self.cycles = name, ranks, header, True
        return ended

    def end(self, average: str | None = None) -> TestTable | None:
        """End the table and return it, or None if it has no row. The next table starts empty."""
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
        labeled = None if NCCL_LINE in line else _LABEL.match(line)
        label, text = (labeled[1], line[labeled.end() :]) if labeled else ("", line)
        if label not in outputs and text.startswith("#") and len(outputs) < MOST_LABELS:
            outputs[label] = _Output(source)
        if (output := outputs.get(label)) and (table := output.read(text)):
            yield _named(table, outputs[""].name)
    name = outputs[""].name
    for output in outputs.values():
        if table := output.end():
            yield _named(table, name)


def _named(table: TestTable, command: str | None) -> TestTable:
    return table if table.name else replace(table, name=command)


def _header(line: str, *, in_place_alone: bool) -> _Header | None:
    words = list(_WORD.finditer(line.replace("#", " ", 1)))
    texts = [word[0] for word in words]
    times = [place for place, text in enumerate(texts) if text in _TIMES]
    if tuple(texts[:3]) != _ROW_NAMES or not times:
        return None
    first, second = times[0], times[1] if len(times) > 1 else len(texts)
    figures = tuple(texts[first:second])
    if not {"algbw", "busbw"} <= set(figures):
        return None
    return _Header(tuple(texts[:first]), figures, 0 if in_place_alone else words[second - 1].end())


def _row(header: _Header, line: str) -> TestRow | None:
    matches = list(_WORD.finditer(line))
    if "redop" in header.names and len(matches) > 3 and _INTEGER.fullmatch(matches[3][0]):
        names = [name for name in header.names if name != "redop"]  # some versions leave it empty
    else:
        names = list(header.names)
    words, first, width = [word[0] for word in matches], len(names), len(header.figures)
    if len(words) < first + width:
        return None
    values = dict(zip(names, words, strict=False))
    figures = [words[first : first + width], words[first + width : first + 2 * width]]
    if len(figures[1]) < width:  # the columns of one way are empty
        figures[1] = []
        if matches[first].end() > header.out_of_place_end:
            figures.reverse()
    reduction, root = values.get("redop", "none"), values.get("root", "-1")
    try:
        ways = [_bandwidth(header.figures, way) if way else None for way in figures]
        return TestRow(
            size_bytes=int(values["size"]),
            count=int(values["count"]),
            datatype=values["type"],
            reduction=None if reduction == "none" else reduction,
            root=int(root) if int(root) >= 0 else None,
            out_of_place=ways[0],
            in_place=ways[1],
        )
    except ValueError:
        return None


def _bandwidth(columns: tuple[str, ...], words: list[str]) -> Bandwidth | None:
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
    value = float(word)
    return (value, None) if math.isfinite(value) else (None, word)


class _JsonWay(BaseModel):
    time: float | None = None
    alg_bw: float | None = None
    bus_bw: float | None = None
    nwrong: float | None = None


class _JsonRow(BaseModel):
    size: int
    count: int
    type: str
    redop: str = "none"
    root: int = -1
    out_of_place: _JsonWay | None = None
    in_place: _JsonWay | None = None


class _JsonConfiguration(BaseModel):
    devices: list[object] = []


class _JsonAverage(BaseModel):
    bandwidth: float | None = None


class _JsonOutput(BaseModel):
    args: list[str] = []
    config: _JsonConfiguration = _JsonConfiguration()
    results: list[_JsonRow]
    average_bus_bandwidth: _JsonAverage = _JsonAverage()


def is_test_json(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is an output of nccl-tests with ``-J``."""
    return head.lstrip().startswith(b"{") and b'"nccl_version"' in head and b'"args"' in head


def _json_table(source: str, content: bytes, where: str) -> TestTable:
    try:
        output = _JsonOutput.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"invalid JSON of nccl-tests: {place + ': ' if place else ''}{first['msg']}",
            where=where,
            do="pass the complete output file of a finished test",
        ) from error
    name = _NAME.search(output.args[0].rpartition("/")[2]) if output.args else None
    average, odd = _finite(output.average_bus_bandwidth.bandwidth)
    rows = tuple(_json_row(row) for row in output.results)
    ranks = len(output.config.devices) or None
    return TestTable(source, name and name[1], ranks, rows, average, {"average_bus_gb_s": odd} if odd else {})


def _json_row(row: _JsonRow) -> TestRow:
    reduction = row.redop.strip()
    return TestRow(
        size_bytes=row.size,
        count=row.count,
        datatype=row.type.strip(),
        reduction=None if reduction == "none" else reduction,
        root=row.root if row.root >= 0 else None,
        out_of_place=_json_way(row.out_of_place),
        in_place=_json_way(row.in_place),
    )


def _json_way(way: _JsonWay | None) -> Bandwidth | None:
    if way is None or way.bus_bw is None:
        return None
    printed = {"time_us": way.time, "algorithm_gb_s": way.alg_bw, "bus_gb_s": way.bus_bw, "wrong": way.nwrong}
    values = {name: _finite(value) for name, value in printed.items()}
    not_finite = {name: odd for name, (_, odd) in values.items() if odd}
    return Bandwidth(**{name: value for name, (value, _) in values.items()}, not_finite=not_finite)


def _finite(value: float | None) -> tuple[float | None, str | None]:
    return (value, None) if value is None or math.isfinite(value) else (None, str(value))


def same_tests(tests: Iterable[TestTable]) -> list[list[TestTable]]:
    """Group tables of different files by test and kind of time; tables without a test's name stay alone."""
    groups: list[list[TestTable]] = []
    for test in tests:
        fits = (
            group
            for group in groups
            if test.name
            and (group[0].name, group[0].is_of_cpu_time) == (test.name, test.is_of_cpu_time)
            and test.source not in {one.source for one in group}
        )
        if group := next(fits, None):
            group.append(test)
        else:
            groups.append([test])
    return groups

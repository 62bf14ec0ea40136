# SPDX-License-Identifier: Apache-2.0
"""Summaries of NCCL logs and nccl-tests, as tables and as a JSON document."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from llmb.report.numbers import number, whole
from llmb.report.table import Column, Table, number_column, result_table, table_of
from llmb.shown_text import printable
from llmb.traces.nccl_summary import Collective, NcclSummary, StepTraffic
from llmb.traces.nccl_tests import Bandwidth, TestRow, TestTable, same_tests

PLACES = ("out_of_place", "in_place")
MOST_ROWS = 40
MIB = 2**20
Key = tuple[int, str, str | None]
"""What lines of several files are matched by: size, datatype and reduction."""


def nccl_document(summary: NcclSummary | None, tests: Sequence[TestTable]) -> dict[str, Any]:
    """The JSON document; ``log`` is null if no line is NCCL's."""
    return {"log": summary and asdict(summary), "tests": [asdict(table) for table in tests]}


def nccl_tables(summary: NcclSummary | None, tests: Sequence[TestTable]) -> Iterator[Table]:
    if summary:
        yield _collectives_table(summary)
        if summary.steps:
            yield _steps_table(summary)
    for group in same_tests(tests):
        places = [place for place in PLACES if all(getattr(row, place) for test in group for row in test.rows)]
        if len(group) > 1 and places:
            yield _comparison(group, places[0])
        else:
            yield from map(_test_table, group)


def _collectives_table(summary: NcclSummary) -> Table:
    columns: list[Column[Collective]] = [
        Column("operation", lambda row: row.operation),
        Column("datatype", lambda row: row.datatype),
        number_column("ranks", lambda row: row.ranks, str),
        number_column("communicators", _communicators, str),
        number_column("count", _count, str),
        number_column("MiB per call", lambda row: row.bytes_per_call, _mib),
        number_column("calls per rank", lambda row: row.calls_per_rank),
        number_column("MiB per rank", lambda row: row.bytes_per_rank, _mib),
    ]
    title = f"Collectives: {summary.calls:,} calls of {summary.logged_ranks} ranks"
    table = table_of(title, summary.collectives[:MOST_ROWS], columns)
    hidden = len(summary.collectives) - MOST_ROWS
    notes = [f"{hidden} smaller rows are left out, see --json."] if hidden > 0 else []
    if summary.coarse:
        notes.append("There are too many sizes; they are grouped by powers of two.")
    if any(row.communicators_from == "number of ranks" for row in summary.collectives):
        notes.append("~ assumes that the log is of all ranks of each communicator.")
    table.caption = "\n".join([*notes, *(f"{printable(note)}." for note in summary.notes)]) or None
    return table


def _communicators(row: Collective) -> str:
    if row.communicators is None:
        return "n/a"
    return f"{'~' if row.communicators_from == 'number of ranks' else ''}{row.communicators}"


def _count(row: Collective) -> str:
    return f"{row.count:,}" if row.count is not None else f"{row.count_least:,}-{row.count_most:,}"


def _mib(size: float | None) -> str:
    return "n/a" if size is None else number(size / MIB)


def _steps_table(summary: NcclSummary) -> Table:
    columns: list[Column[StepTraffic]] = [
        number_column("step", lambda step: step.step, str),
        number_column("calls per rank", lambda step: step.calls_per_rank),
        number_column("MiB per rank", lambda step: step.bytes_per_rank, _mib),
    ]
    return table_of("By step", summary.steps, columns)


def _test_table(test: TestTable) -> Table:
    columns: list[Column[TestRow]] = [
        number_column("bytes", lambda row: row.size_bytes, whole),
        Column("type", lambda row: row.datatype),
        Column("redop", lambda row: row.reduction),
        *_ways(lambda row: row.out_of_place),
        *_ways(lambda row: row.in_place, " "),
    ]
    table = table_of(_title(test), test.rows, columns)
    average = test.not_finite.get("average_bus_gb_s", number(test.average_bus_gb_s))
    table.caption = f"Left: out of place, right: in place. Average bus bandwidth: {printable(average)} GB/s."
    return table


def _title(test: TestTable) -> str:
    ranks = f" on {test.ranks} ranks" if test.ranks else ""
    return f"{test.name or 'nccl-tests'}{ranks}, {test.source}"


def _ways(way_of: Callable[[TestRow], Bandwidth | None], end: str = "") -> Iterator[Column[TestRow]]:
    figures = {"time us": "time_us", "algbw GB/s": "algorithm_gb_s", "busbw GB/s": "bus_gb_s", "wrong": "wrong"}
    for header, name in figures.items():
        yield number_column(f"{header}{end}", partial(_figure, way_of, name), str)


def _figure(way_of: Callable[[TestRow], Bandwidth | None], name: str, row: TestRow) -> str:
    way = way_of(row)
    return "n/a" if way is None else printable(way.not_finite.get(name, number(getattr(way, name))))


def _comparison(tests: Sequence[TestTable], place: str) -> Table:
    """Bus bandwidth of the same sizes in several files, and the ratio to the first file."""
    sources = [test.source for test in tests]
    right = ("bytes", *sources, *(f"{source} / first" for source in sources[1:]))
    title = f"{tests[0].name or 'nccl-tests'}: bus bandwidth in GB/s, {place.replace('_', ' ')}"
    table = result_table(title, "bytes", "type", "redop", *right[1:], right=right)
    by_key = [{_key(row): row for row in test.rows} for test in tests]
    for key in sorted({key for rows in by_key for key in rows}, key=lambda key: (key[1], key[2] or "", key[0])):
        values = [_bus(rows.get(key), place) for rows in by_key]
        ratios = [value / values[0] if value is not None and values[0] else None for value in values[1:]]
        table.add_row(f"{key[0]:,}", key[1], key[2] or "", *map(number, values), *map(number, ratios))
    averages = ", ".join(f"{test.source} {number(test.average_bus_gb_s)}" for test in tests)
    wrong = [test.source for test in tests if _has_wrong(test)]
    notes = [f"Average bus bandwidth, GB/s: {averages}."]
    if wrong:
        notes.append(f"Wrong results in {', '.join(wrong)}.")
    if len({test.ranks for test in tests} - {None}) > 1:
        notes.append(f"Ranks: {', '.join(f'{test.source} {number(test.ranks)}' for test in tests)}.")
    if tests[0].name is None:
        notes.append("The files do not name their test: that it is the same is assumed from columns and bus factor.")
    table.caption = " ".join(notes)
    return table


def _key(row: TestRow) -> Key:
    return row.size_bytes, row.datatype, row.reduction


def _bus(row: TestRow | None, place: str) -> float | None:
    way: Bandwidth | None = getattr(row, place) if row else None
    return way.bus_gb_s if way else None


def _has_wrong(test: TestTable) -> bool:
    return any(way and way.wrong for row in test.rows for way in (row.out_of_place, row.in_place))

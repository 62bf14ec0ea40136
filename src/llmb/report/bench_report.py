# SPDX-License-Identifier: Apache-2.0
"""Measurements of microbenchmarks, as tables and as JSON documents."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

from llmb.microbenchmarks.history import FigureChange, changes
from llmb.microbenchmarks.records import Measurement, MeasurementFile, NotMeasured
from llmb.report.numbers import number
from llmb.report.table import Column, Table
from llmb.shown_text import printable

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
NOTES = {
    "gemm": "dgrad: gradient of the input; wgrad: gradient of the weight.",
    "attention": "FLOPs of the causal half; a backward pass counts 2.5 forward passes.",
    "memory": "GB/s: bytes read and bytes written.",
    "launch": "Per operation. host: until it is queued, or done on a CPU; device: in a full queue; graph: in a CUDA "
    "graph; round_trip: alone, until it is done.",
}
"""What the figures of a benchmark mean."""
SCATTERED = 2.0
"""A median so many times the fastest repetition is not the device's doing."""
Row = TypeVar("Row")


class _Figure(NamedTuple, Generic[Row]):
    """A column that is shown where a row has a value for it. A ``common`` one is in the title if all are equal."""

    header: str
    value: Callable[[Row], str | None]
    right: bool = True
    common: bool = False


def measurement_document(measured: MeasurementFile) -> dict[str, Any]:
    """What is kept, with the share of the peak of each row."""
    document = measured.model_dump(mode="json")
    for row, values in zip(measured.measurements, document["measurements"], strict=True):
        values["peak_pct"] = row.peak_pct
    return document


def measurement_tables(measured: MeasurementFile, title: str) -> Iterator[Table]:
    """Bursts, then what was sustained, then what could not be measured."""
    rows = measured.measurements
    parts = [[row for row in rows if row.sustained == sustained] for sustained in (False, True)]
    headings = (title, f"Sustained: {title[:1].lower()}{title[1:]}")
    tables = [measurement_table(part, heading) for part, heading in zip(parts, headings, strict=True) if part]
    if tables:
        tables[-1].caption = _notes(rows)
    yield from tables
    if measured.not_measured:
        yield not_measured_table(measured.not_measured)


def not_measured_table(rows: Sequence[NotMeasured]) -> Table:
    table = Table("Not measured", [Column("case"), Column("shape"), Column("dtype"), Column("reason")])
    for missing in rows:
        what = missing.shape or _whole(missing.size_bytes) or ""
        table.add_row(missing.case, what, missing.dtype or "", printable(missing.reason))
    return table


def measurement_table(rows: Sequence[Measurement], title: str) -> Table:
    """One line a row. A column that is empty for all rows is left out."""
    unit, seconds = _unit(rows)
    figures: list[_Figure[Measurement]] = [
        _Figure("device", lambda row: row.device, right=False, common=True),
        _Figure("threads", lambda row: _threads(row.cpu_threads), common=True),
        _Figure("rank", lambda row: _whole(row.rank)),
        _Figure("case", lambda row: row.case, right=False),
        _Figure("bytes", lambda row: _whole(row.size_bytes)),
        _Figure("shape", lambda row: row.shape, right=False),
        _Figure("dtype", lambda row: row.dtype, right=False, common=True),
        _Figure("kernel", lambda row: row.backend, right=False, common=True),
        _Figure(unit, lambda row: number(row.time_s / seconds)),
        _Figure("TFLOPS", lambda row: _known(row.tflops)),
        _Figure("GB/s", lambda row: _known(row.bandwidth_gb_per_s)),
        _Figure("bus GB/s", lambda row: _known(row.bus_bandwidth_gb_per_s)),
        _Figure("peak %", lambda row: None if row.peak_pct is None else f"{row.peak_pct:.1f}"),
    ]
    return _table(rows, title, figures)


def _notes(rows: Sequence[Measurement]) -> str | None:
    """What the figures mean, why some are missing, and whether the machine was busy."""
    notes = list(dict.fromkeys(NOTES[row.benchmark] for row in rows if row.benchmark in NOTES))
    notes += dict.fromkeys(f"No share of the peak: {row.peak_reason}." for row in rows if row.peak_reason)
    scatter = max((row.time_s / row.fastest_s for row in rows if row.fastest_s), default=1.0)
    if scatter >= SCATTERED:
        notes.append(
            f"Times are medians; the fastest repetition was up to {scatter:.3g} times faster: other work seems to "
            "disturb this machine."
        )
    return "\n".join(map(printable, notes)) or None


def _table(rows: Sequence[Row], title: str, figures: Sequence[_Figure[Row]]) -> Table:
    values = {figure.header: [figure.value(row) for row in rows] for figure in figures}
    shared = [figure for figure in figures if figure.common and len(set(values[figure.header])) == 1]
    titles = [title, *(text for figure in shared if (text := values[figure.header][0]) is not None)]
    shown = [figure for figure in figures if figure not in shared and any(values[figure.header])]
    table = Table(printable(", ".join(titles)), [Column(figure.header, right=figure.right) for figure in shown])
    for number_ in range(len(rows)):
        table.add_row(*(printable(values[figure.header][number_] or "") for figure in shown))
    return table


def _unit(rows: Sequence[Measurement]) -> tuple[str, float]:
    """One for all rows of a table, in which the middle one is at least 1."""
    middle = median(row.time_s for row in rows)
    return next(((name, size) for name, size in UNITS if middle >= size), UNITS[-1])


def _threads(count: int | None) -> str | None:
    return None if count is None else f"{count} thread{'' if count == 1 else 's'}"


def _whole(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _known(value: float | None) -> str | None:
    return None if value is None else number(value)


def history_document(files: Sequence[MeasurementFile], benchmark: str | None) -> dict[str, Any]:
    """``changes`` has the newest measurement of every case; ``change_pct`` is above 0 if it became faster."""
    found = [
        {
            "measured_at": change.measured_at,
            "latest": change.latest.model_dump(mode="json"),
            "previous_at": change.previous_at,
            "previous": change.previous and change.previous.model_dump(mode="json"),
            "change_pct": change.speed_pct,
            "times_measured": change.times,
        }
        for change in changes(files, benchmark)
    ]
    return {"changes": found}


def history_tables(files: Sequence[MeasurementFile], benchmark: str | None, folder: Path) -> Iterator[Table]:
    """One of each node and benchmark."""
    found = changes(files, benchmark)
    if not found:
        what = f"No measurement{f' of {benchmark}' if benchmark else ''} in {folder}"
        yield Table(printable(what), [Column("")], caption="'llmb bench gemm' measures matrix products.")
    for (node, name), group in groupby(found, key=lambda change: (change.latest.node, change.latest.benchmark)):
        yield _history_table(list(group), f"{name} on node {node}")


def _history_table(found: Sequence[FigureChange], title: str) -> Table:
    rows = [change.latest for change in found]
    unit, seconds = _unit(rows)
    rated = any(row.tflops or row.bandwidth_gb_per_s or row.bus_bandwidth_gb_per_s for row in rows)
    figures: list[_Figure[FigureChange]] = [
        _Figure("device", lambda change: change.latest.device, right=False, common=True),
        _Figure("rank", lambda change: _whole(change.latest.rank)),
        _Figure("case", lambda change: _case(change.latest), right=False),
        _Figure("bytes", lambda change: _whole(change.latest.size_bytes)),
        _Figure("shape", lambda change: change.latest.shape, right=False),
        _Figure("dtype", lambda change: change.latest.dtype, right=False, common=True),
        _Figure("measured", lambda change: _minute(change.measured_at), right=False, common=True),
        _Figure("TFLOPS", lambda change: _known(change.latest.tflops)),
        _Figure("GB/s", lambda change: _known(change.latest.bandwidth_gb_per_s)),
        _Figure("bus GB/s", lambda change: _known(change.latest.bus_bandwidth_gb_per_s)),
        _Figure(unit, lambda change: None if rated else number(change.latest.time_s / seconds)),
        _Figure("change %", lambda change: None if change.speed_pct is None else f"{change.speed_pct:+.1f}"),
    ]
    table = _table(found, title, figures)
    if any(change.previous for change in found):
        table.caption = "Change: faster (+) or slower (-) than the previous measurement of the same case."
    return table


def _case(row: Measurement) -> str:
    return f"{row.case}, sustained" if row.sustained else row.case


def _minute(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC"

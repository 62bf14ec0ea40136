# SPDX-License-Identifier: Apache-2.0
"""Measurements of microbenchmarks, as tables and as JSON documents."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from llmb.microbenchmarks.history import changes
from llmb.microbenchmarks.records import Measurement, MeasurementFile
from llmb.report.numbers import number
from llmb.report.output import printable
from llmb.report.table import Column, Table

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


class _Figure(NamedTuple):
    """A column that is shown where a row has a value for it."""

    header: str
    value: Callable[[Measurement], str | None]
    right: bool = True


def measurement_document(measured: MeasurementFile) -> dict[str, Any]:
    """What is kept, with the share of the peak of each row."""
    document = measured.model_dump(mode="json")
    for row, values in zip(measured.measurements, document["measurements"], strict=True):
        values["peak_pct"] = row.peak_pct
    return document


def measurement_tables(measured: MeasurementFile, title: str) -> Iterator[Table]:
    """Bursts, then what was sustained, then what could not be measured."""
    rows = measured.measurements
    for sustained, heading in ((False, title), (True, f"Sustained: {title}")):
        if found := [row for row in rows if row.sustained == sustained]:
            yield measurement_table(found, heading)
    if measured.not_measured:
        table = Table("Not measured", [Column("case"), Column("shape"), Column("dtype"), Column("reason")])
        for missing in measured.not_measured:
            table.add_row(missing.case, missing.shape or "", missing.dtype or "", printable(missing.reason))
        yield table


def measurement_table(rows: Sequence[Measurement], title: str) -> Table:
    """One line a row; a column that is empty for all rows is left out, and reasons are below."""
    unit, seconds = _unit(rows)
    figures = [
        _Figure("rank", lambda row: _whole(row.rank)),
        _Figure("case", lambda row: row.case, right=False),
        _Figure("bytes", lambda row: _whole(row.size_bytes)),
        _Figure("shape", lambda row: row.shape, right=False),
        _Figure("dtype", lambda row: row.dtype, right=False),
        _Figure("kernel", lambda row: row.backend, right=False),
        _Figure(unit, lambda row: number(row.time_s / seconds)),
        _Figure("TFLOPS", lambda row: _known(row.tflops)),
        _Figure("GB/s", lambda row: _known(row.bandwidth_gb_per_s)),
        _Figure("bus GB/s", lambda row: _known(row.bus_bandwidth_gb_per_s)),
        _Figure("peak %", lambda row: None if row.peak_pct is None else f"{row.peak_pct:.1f}"),
    ]
    shown = [figure for figure in figures if any(figure.value(row) is not None for row in rows)]
    table = Table(printable(title), [Column(figure.header, right=figure.right) for figure in shown])
    for row in rows:
        table.add_row(*(printable(figure.value(row) or "") for figure in shown))
    reasons = dict.fromkeys(row.peak_reason for row in rows if row.peak_reason)
    table.caption = printable(" ".join(f"No share of the peak: {reason}." for reason in reasons if reason)) or None
    return table


def _unit(rows: Sequence[Measurement]) -> tuple[str, float]:
    """One for all rows of a table, in which the middle one is at least 1."""
    middle = median(row.time_s for row in rows)
    return next(((name, size) for name, size in UNITS if middle >= size), UNITS[-1])


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


def history_table(files: Sequence[MeasurementFile], benchmark: str | None, folder: Path) -> Table:
    right = ("TFLOPS", "GB/s", "us", "change %")
    names = ("node", "benchmark", "case", "shape", "dtype", "measured", *right)
    table = Table("Measurements of each node", [Column(name, right=name in right) for name in names])
    for change in changes(files, benchmark):
        row = change.latest
        what = row.shape or _whole(row.size_bytes) or ""
        case = f"{row.case} (sustained)" if row.sustained else row.case
        rates = (_known(row.tflops), _known(row.bandwidth_gb_per_s), number(row.time_s * 1e6))
        changed = "" if change.speed_pct is None else f"{change.speed_pct:+.1f}"
        cells = (row.node, row.benchmark, case, what, row.dtype or "", change.measured_at[:16], *rates, changed)
        table.add_row(*(printable(cell or "") for cell in cells))
    if not table.rows:
        table.caption = printable(f"None in {folder}; 'llmb bench gemm' measures matrix products.")
    else:
        table.caption = "Change: how much faster (+) or slower (-) than the measurement before, of the same case."
    return table

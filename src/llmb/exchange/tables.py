# SPDX-License-Identifier: Apache-2.0
"""Results and steps as tables: CSV, JSON lines, Parquet, OpenMetrics."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.errors import EnvironmentProblem
from llmb.exchange.columns import (
    RESULTS,
    STEPS,
    ExportColumn,
    Row,
    RunSource,
    Scalar,
    rows_of,
    step_rows,
)
from llmb.runs.folder import new_file

if TYPE_CHECKING:
    import pandas

ROWS_AT_ONCE = 100_000
"""Rows of a Parquet file that are in memory, and one of its row groups."""
PREFIX = "llmb_"
LABELS = ("run", "label", "campaign", "workload", "size", "dtype", "gpu_type", "scale")
"""What every metric is labeled with."""
DESCRIBING = ("status", "verdict", "program", "llmb_version", "driver", "image")
"""What ``llmb_run``, which is always 1, has in addition."""


def write_csv(runs: RunSource, folder: Path) -> Iterator[Path]:
    """A value that is not known is empty; a number that is not finite is ``nan``, ``inf`` or ``-inf``."""
    yield _csv_file(folder / "results.csv", RESULTS, runs())
    yield _csv_file(folder / "steps.csv", STEPS, step_rows(runs()))


def _csv_file(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> Path:
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows_of(columns, rows))
    return path


def data_frame(columns: Sequence[ExportColumn[Row]], rows: Iterable[Row]) -> "pandas.DataFrame":
    """A table for a notebook. Raises EnvironmentProblem if pandas is not installed."""
    types = {str: "string", int: "Int64", float: "float64", bool: "boolean"}
    found = list(rows_of(columns, iter(rows)))
    frame = frame_of(found, [column.name for column in columns])
    return frame.astype({column.name: types[column.kind] for column in columns})


def frame_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> "pandas.DataFrame":
    """Rows of plain values. Raises EnvironmentProblem if pandas is not installed."""
    if find_spec("pandas") is None:
        raise EnvironmentProblem("a data frame needs pandas, which is not installed", do="pip install pandas")
    import pandas

    return pandas.DataFrame(rows, columns=list(names))


def write_jsonl(runs: RunSource, folder: Path) -> Iterator[Path]:
    yield _jsonl_file(folder / "results.jsonl", RESULTS, runs())
    yield _jsonl_file(folder / "steps.jsonl", STEPS, step_rows(runs()))


def _jsonl_file(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> Path:
    with new_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(_finite(row), allow_nan=False)}\n" for row in rows_of(columns, rows))
    return path


def _finite(row: dict[str, Scalar | None]) -> dict[str, Any]:
    """JSON has no NaN: as in ``metrics.jsonl`` such a value is null, and ``not_finite`` has it as text."""
    spoiled = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(spoiled), "not_finite": spoiled} if spoiled else row


def write_parquet(runs: RunSource, folder: Path) -> Iterator[Path]:
    yield _parquet_file(folder / "results.parquet", RESULTS, runs())
    yield _parquet_file(folder / "steps.parquet", STEPS, step_rows(runs()))


def _parquet_file(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet

    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(column.name, types[column.kind]) for column in columns])
    found = rows_of(columns, rows)
    with new_file(path) as partial, parquet.ParquetWriter(partial, schema) as writer:
        while some := list(islice(found, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))
    return path


def write_openmetrics(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Results as a text file, which the textfile collector of Prometheus' node exporter reads, too.

    All metrics are gauges without a time: that collector refuses times, and knows no other type that is in both forms.
    """
    path = folder / "llmb.prom"
    rows = list(rows_of(RESULTS, runs()))
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in _lines(rows))
    yield path


def _lines(rows: Sequence[Mapping[str, Scalar | None]]) -> Iterator[str]:
    """All runs of a metric follow each other, as both formats require."""
    yield f"# TYPE {PREFIX}run gauge"
    yield from (f"{PREFIX}run{_labels(row, (*LABELS, *DESCRIBING))} 1" for row in rows)
    for name in (column.name for column in RESULTS if column.kind is float):
        values = [(row, value) for row in rows if (value := row[name]) is not None]
        yield from [f"# TYPE {PREFIX}{name} gauge"] if values else []
        yield from (f"{PREFIX}{name}{_labels(row, LABELS)} {_number(value)}" for row, value in values)
    yield "# EOF"


def _labels(row: Mapping[str, Scalar | None], names: Sequence[str]) -> str:
    known = {name: value for name in names if (value := row[name]) is not None}
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in known.items()) + "}"


def _escaped(value: Scalar) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Scalar) -> str:
    """In full precision, and as both formats write what is not finite."""
    number = float(value)
    return repr(number) if math.isfinite(number) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]

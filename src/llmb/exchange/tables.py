# SPDX-License-Identifier: Apache-2.0
"""Results and steps as tables: CSV, JSON lines, Parquet."""

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
from llmb.exchange.new_file import new_file

if TYPE_CHECKING:
    import pandas

ROWS_AT_ONCE = 100_000
"""Rows of a Parquet file that are in memory, and one of its row groups."""


def write_csv(runs: RunSource, folder: Path) -> list[Path]:
    """A value that is not known is empty; a number that is not finite is ``nan``, ``inf`` or ``-inf``."""
    return [
        _csv_file(folder / "results.csv", RESULTS, runs()),
        _csv_file(folder / "steps.csv", STEPS, step_rows(runs())),
    ]


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


def write_jsonl(runs: RunSource, folder: Path) -> list[Path]:
    return [
        _jsonl_file(folder / "results.jsonl", RESULTS, runs()),
        _jsonl_file(folder / "steps.jsonl", STEPS, step_rows(runs())),
    ]


def _jsonl_file(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> Path:
    with new_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(_finite(row), allow_nan=False)}\n" for row in rows_of(columns, rows))
    return path


def _finite(row: dict[str, Scalar | None]) -> dict[str, Any]:
    """JSON has no NaN: as in ``metrics.jsonl`` such a value is null, and ``not_finite`` has it as text."""
    spoiled = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**row, **dict.fromkeys(spoiled), "not_finite": spoiled} if spoiled else row


def write_parquet(runs: RunSource, folder: Path) -> list[Path]:
    return [
        _parquet_file(folder / "results.parquet", RESULTS, runs()),
        _parquet_file(folder / "steps.parquet", STEPS, step_rows(runs())),
    ]


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

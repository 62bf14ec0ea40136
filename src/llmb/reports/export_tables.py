# SPDX-License-Identifier: Apache-2.0
"""Results and steps as CSV, JSON lines, Parquet and data frames with the same columns; results as OpenMetrics."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from llmb.base.errors import EnvironmentProblem
from llmb.catalogue.records import PARALLEL, Convention, Window
from llmb.launch.programs.conclude import EndedRun
from llmb.reports.table import Column, Row, getter, texts, write_csv_rows
from llmb.runs.conditions import identity_of
from llmb.runs.folder import new_file
from llmb.runs.steps import ExpertLoad, Fp8Counts, Step

if TYPE_CHECKING:
    import pandas


Scalar = str | int | float | bool
_RECIPE, _RECORD, _RESULT = "run.plan.recipe.", "run.record.", "run.result."
_TIMES = f"{_RESULT}step_time_s."
ROWS_AT_ONCE = 100_000
"""Number of rows in a row group of a Parquet file, which are in memory at the same time."""
PREFIX = "llmb_"
LABELS = ("run", "label", "campaign", "workload", "size", "dtype", "gpu_type", "scale")
"""Labels of every metric."""
DESCRIBING = ("status", "verdict", "program", "llmb_version", "driver", "image")
"""Additional labels of ``llmb_run``, which is always 1."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """An exported run. ``steps`` is empty for a program that records none."""

    run: EndedRun
    campaign: str | None
    steps: Sequence[Step]

    @property
    def id(self) -> str:
        return self.run.record.id

    @property
    def window(self) -> Window:
        return self.run.result.window or self.run.plan.window


StepRow = tuple[ExportedRun, Step]
RunSource = Callable[[], Iterator[ExportedRun]]
"""Yields all runs; it is called once for each format, or for each table of a format."""


def rows_of(columns: Sequence[Column[Row]], rows: Iterator[Row]) -> Iterator[dict[str, Scalar | None]]:
    for row in rows:
        yield {column.header: column.of(row) for column in columns}


def step_rows(runs: Iterator[ExportedRun]) -> Iterator[StepRow]:
    for run in runs:
        for step in run.steps:
            yield run, step


def _columns(kind: type[Scalar], record: str, *names: str) -> list[Column[Any]]:
    """Return columns of values whose paths begin with ``record``, named as in ``texts``; names include the unit."""
    return [replace(column, value=f"{record}{column.value}") for column in texts(*names, kind=kind)]


def _by_convention(name: str) -> list[Column[Any]]:
    return _columns(float, _RESULT, *(f"{name}_{each.value}: {name}.{each.value}" for each in Convention))


RESULTS: tuple[Column[ExportedRun], ...] = (
    *_columns(str, "", "run: id", "label: run.record.label", "campaign"),
    *_columns(str, _RECIPE, "workload", "size", "dtype", "gpu_type"),
    *_columns(int, _RECIPE, "scale"),
    *_columns(bool, _RECIPE, "proxy"),
    *_columns(int, _RECIPE, "pretended_rank"),
    Column("identity", lambda one: identity_of(one.run.record).key),
    *_columns(int, f"{_RECIPE}layout.", "gpus", *PARALLEL, "dp", "mbs", "gbs", "seq_len", "layers"),
    *_columns(str, _RECORD, "program", "llmb_version", "llmb_commit", "image", "started_at", "ended_at"),
    Column("nodes", lambda one: " ".join(getter(f"{_RECORD}environment.nodes")(one) or ()) or None),
    *_columns(str, f"{_RECORD}environment.", "device", "driver", "cuda", "nccl", "torch", "python"),
    *_columns(str, _RESULT, "status", "reason", "measurement_reason"),
    *_columns(int, "", f"steps: {_RESULT}steps", "window_first: window.first", "window_last: window.last"),
    *_columns(int, _TIMES, "step_time_count: count"),
    *_columns(float, _TIMES, "step_time_mean_s: mean", "step_time_median_s: median", "step_time_std_s: std"),
    *_columns(float, _TIMES, "step_time_cv: cv", "step_time_min_s: min", "step_time_max_s: max"),
    *_columns(float, _TIMES, "step_time_ci95_low_s: ci95.0", "step_time_ci95_high_s: ci95.1"),
    *_columns(float, _RECIPE, "published_step_time_s: expectations.0.step_time_s"),
    *_columns(str, _RESULT, "verdict: verdict_name"),
    *_columns(float, _RESULT, "verdict_delta_pct: verdict.delta_pct"),
    *_columns(float, _RESULT, "tokens_per_s", "tokens_per_s_per_gpu", "real_tokens_per_s"),
    *_by_convention("tflops_per_gpu"),
    *_by_convention("mfu_pct"),
    *_columns(float, _RESULT, "days_per_1t_tokens", "loss_first: loss.first", "loss_last: loss.last"),
    *_columns(float, _RESULT, "peak_memory_gib", "compute_time_mean_s: pretended.compute_time_s.mean"),
    *_columns(float, _RESULT, "rank_peak_memory_gib: pretended.peak_memory_gib"),
)
"""The exported columns of a run, with values as in ``llmb result --json``, and settings as in the run's record."""


def _of_step(kind: type, prefix: str = "") -> Iterator[Column[StepRow]]:
    """Yield a column for each scalar of a step and, prefixed with the record's name, of its nested records."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        plain = next(one for one in get_args(hint) if one is not type(None)) if isinstance(hint, UnionType) else hint
        if plain in (ExpertLoad, Fp8Counts):
            yield from _of_step(plain, f"{field.name}.")
        elif get_origin(plain) is not tuple:  # of layers, which a table has no columns for
            path = f"{prefix}{field.name}"
            yield from _columns(plain, "", f"{path.replace('.', '_')}: 1.{path}")


STEPS: tuple[Column[StepRow], ...] = (
    *_columns(str, "0.", "run: id"),
    *_of_step(Step),
    Column("in_window", lambda row: row[1].step in row[0].window, kind=bool),
)
"""The exported columns of a step: its run's id, its scalars in ``metrics.jsonl``, and whether it is in the window."""


def write_tables(
    ending: str, write: Callable[[Path, Sequence[Column[Any]], Iterator[Any]], None], runs: RunSource, folder: Path
) -> Iterator[Path]:
    """Write the files ``results`` and ``steps`` in one format; yield the path of each once it is complete."""
    for name, columns, rows in (("results", RESULTS, runs()), ("steps", STEPS, step_rows(runs()))):
        path = folder / f"{name}.{ending}"
        with new_file(path) as partial:
            write(partial, columns, rows)
        yield path


def write_csv(path: Path, columns: Sequence[Column[Row]], rows: Iterator[Row]) -> None:
    """Write a CSV file: an unknown value is empty; a non-finite number is ``nan``, ``inf`` or ``-inf``."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        write_csv_rows(file, columns, rows)


def data_frame(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> "pandas.DataFrame":
    """Return a data frame for a notebook. Raise EnvironmentProblem if pandas is not installed."""
    types = {str: "string", int: "Int64", float: "float64", bool: "boolean"}
    found = list(rows_of(columns, iter(rows)))
    frame = frame_of(found, [column.header for column in columns])
    return frame.astype({column.header: types[column.kind] for column in columns})


def frame_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> "pandas.DataFrame":
    """Return a data frame of rows of plain values. Raise EnvironmentProblem if pandas is not installed."""
    if find_spec("pandas") is None:
        do = "run 'python3 -m pip install pandas' in the environment of this Python"
        raise EnvironmentProblem("a data frame needs pandas, which is not installed", do=do)
    import pandas

    return pandas.DataFrame(rows, columns=list(names))


def write_jsonl(path: Path, columns: Sequence[Column[Row]], rows: Iterator[Row]) -> None:
    """Write JSON lines. As in ``metrics.jsonl``, a non-finite number is null, and ``not_finite`` contains its text."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows_of(columns, rows):
            numbers = ((name, value) for name, value in row.items() if isinstance(value, float))
            spoiled = {name: str(value) for name, value in numbers if not math.isfinite(value)}
            shown = {**row, **dict.fromkeys(spoiled), "not_finite": spoiled} if spoiled else row
            file.write(f"{json.dumps(shown, allow_nan=False)}\n")


def write_parquet(path: Path, columns: Sequence[Column[Row]], rows: Iterator[Row]) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(column.header, types[column.kind]) for column in columns])
    found = rows_of(columns, rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(found, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))


def write_openmetrics(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Write results in OpenMetrics format, which the textfile collector of Prometheus' node exporter also reads.

    All metrics are gauges, which both formats write alike, without timestamps, which the collector rejects.
    """
    path = folder / "llmb.prom"
    rows = list(rows_of(RESULTS, runs()))
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in _lines(rows))
    yield path


def _lines(rows: Sequence[Mapping[str, Scalar | None]]) -> Iterator[str]:
    """Yield the lines grouped by metric, as OpenMetrics and Prometheus require."""
    yield f"# TYPE {PREFIX}run gauge"
    yield from (f"{PREFIX}run{_labels(row, (*LABELS, *DESCRIBING))} 1" for row in rows)
    for name in (column.header for column in RESULTS if column.kind is float):
        values = [(row, value) for row in rows if (value := row[name]) is not None]
        yield from [f"# TYPE {PREFIX}{name} gauge"] if values else []
        yield from (f"{PREFIX}{name}{_labels(row, LABELS)} {_number(value)}" for row, value in values)
    yield "# EOF"


def _labels(row: Mapping[str, Scalar | None], names: Sequence[str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    texts = {name: str(value).translate(escapes) for name in names if (value := row[name]) is not None}
    return "{" + ",".join(f'{name}="{text}"' for name, text in texts.items()) + "}"


def _number(value: Scalar) -> str:
    """Format a number in full precision, and non-finite ones as OpenMetrics and Prometheus require."""
    number = float(value)
    return repr(number) if math.isfinite(number) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]

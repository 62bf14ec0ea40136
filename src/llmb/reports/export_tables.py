# SPDX-License-Identifier: Apache-2.0
"""Results and steps as tables, of one list of columns: CSV, JSON lines, Parquet, OpenMetrics."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

from llmb.base.errors import EnvironmentProblem
from llmb.base.missing import Missing
from llmb.catalogue.records import PARALLEL, Convention, Window
from llmb.launch.programs.conclude import EndedRun
from llmb.reports.table import write_csv_rows
from llmb.runs.conditions import identity_of
from llmb.runs.folder import new_file
from llmb.runs.steps import ExpertLoad, Fp8Counts, Step

if TYPE_CHECKING:
    import pandas


Scalar = str | int | float | bool
Row = TypeVar("Row")
_RECIPE, _RECORD, _RESULT = "run.plan.recipe", "run.record", "run.result"
ROWS_AT_ONCE = 100_000
"""Rows of a Parquet file that are in memory, and one of its row groups."""
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


@dataclass(frozen=True, slots=True)
class ExportColumn(Generic[Row]):
    """A value of each row, or None if it is unknown. The name has the unit."""

    name: str
    kind: type[Scalar]
    value: Callable[[Row], Scalar | None]


Result = ExportColumn[ExportedRun]
StepRow = tuple[ExportedRun, Step]
RunSource = Callable[[], Iterator[ExportedRun]]
"""Yields the runs from the first; called again for each file."""


def rows_of(columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> Iterator[dict[str, Scalar | None]]:
    for row in rows:
        yield {column.name: column.value(row) for column in columns}


def step_rows(runs: Iterator[ExportedRun]) -> Iterator[StepRow]:
    for run in runs:
        for step in run.steps:
            yield run, step


def _column(name: str, kind: type[Scalar], path: str) -> ExportColumn[Any]:
    """Return a column of the values at ``path``: fields of records, keys of mappings, and indexes of tuples."""
    names = path.split(".")
    return ExportColumn(name, kind, lambda row: _at(row, names))


def _columns(path: str, kind: type[Scalar], *names: str) -> Iterator[Result]:
    """Fields of the record at ``path``, by their own names."""
    for name in names:
        yield _column(name, kind, f"{path}.{name}")


def _at(value: Any, names: Sequence[str]) -> Any:  # noqa: ANN401 (a value of any kind of record)
    """Return the value at a path; None below an unknown value."""
    for name in names:
        if value is None or isinstance(value, Missing):
            return None
        if isinstance(value, dict):
            value = value.get(name)
        else:
            value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def _step_times(kind: type[Scalar], unit: str, *names: str) -> Iterator[Result]:
    """Statistics of the window's steps."""
    for name in names:
        yield _column(f"step_time_{name}{unit}", kind, f"{_RESULT}.step_time_s.{name}")


def _by_convention(name: str) -> Iterator[Result]:
    for convention in Convention:
        yield _column(f"{name}_{convention.value}", float, f"{_RESULT}.{name}.{convention.value}")


def _published(one: ExportedRun) -> float | None:
    expected = next(iter(one.run.plan.recipe.expectations), None)
    return expected.step_time_s if expected else None


def _nodes(one: ExportedRun) -> str | None:
    return " ".join(one.run.record.environment.nodes) if one.run.record.environment else None


RESULTS: tuple[Result, ...] = (
    _column("run", str, "id"),
    _column("label", str, f"{_RECORD}.label"),
    _column("campaign", str, "campaign"),
    *_columns(_RECIPE, str, "workload", "size", "dtype", "gpu_type"),
    _column("scale", int, f"{_RECIPE}.scale"),
    _column("proxy", bool, f"{_RECIPE}.proxy"),
    _column("pretended_rank", int, f"{_RECIPE}.pretended_rank"),
    ExportColumn("identity", str, lambda one: identity_of(one.run.record).key),
    *_columns(f"{_RECIPE}.layout", int, "gpus", *PARALLEL, "dp", "mbs", "gbs", "seq_len", "layers"),
    *_columns(_RECORD, str, "program", "llmb_version", "llmb_commit", "image", "started_at", "ended_at"),
    ExportColumn("nodes", str, _nodes),
    *_columns(f"{_RECORD}.environment", str, "device", "driver", "cuda", "nccl", "torch", "python"),
    *_columns(_RESULT, str, "status", "reason", "measurement_reason"),
    _column("steps", int, f"{_RESULT}.steps"),
    _column("window_first", int, "window.first"),
    _column("window_last", int, "window.last"),
    *_step_times(int, "", "count"),
    *_step_times(float, "_s", "mean", "median", "std"),
    *_step_times(float, "", "cv"),
    *_step_times(float, "_s", "min", "max"),
    _column("step_time_ci95_low_s", float, f"{_RESULT}.step_time_s.ci95.0"),
    _column("step_time_ci95_high_s", float, f"{_RESULT}.step_time_s.ci95.1"),
    ExportColumn("published_step_time_s", float, _published),
    _column("verdict", str, f"{_RESULT}.verdict_name"),
    _column("verdict_delta_pct", float, f"{_RESULT}.verdict.delta_pct"),
    *_columns(_RESULT, float, "tokens_per_s", "tokens_per_s_per_gpu", "real_tokens_per_s"),
    *_by_convention("tflops_per_gpu"),
    *_by_convention("mfu_pct"),
    _column("days_per_1t_tokens", float, f"{_RESULT}.days_per_1t_tokens"),
    _column("loss_first", float, f"{_RESULT}.loss.first"),
    _column("loss_last", float, f"{_RESULT}.loss.last"),
    _column("peak_memory_gib", float, f"{_RESULT}.peak_memory_gib"),
    _column("compute_time_mean_s", float, f"{_RESULT}.pretended.compute_time_s.mean"),
    _column("rank_peak_memory_gib", float, f"{_RESULT}.pretended.peak_memory_gib"),
)
"""The exported columns of a run; values as in ``llmb result --json``, settings as in its record."""


def _of_step(kind: type, prefix: str = "") -> Iterator[ExportColumn[StepRow]]:
    """The fields of a step, and those of the records in it, with the record's name before them."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        plain = next(one for one in get_args(hint) if one is not type(None)) if isinstance(hint, UnionType) else hint
        if plain in (ExpertLoad, Fp8Counts):
            yield from _of_step(plain, f"{field.name}.")
        else:
            path = f"{prefix}{field.name}"
            yield _column(path.replace(".", "_"), plain, f"1.{path}")


def _in_window(row: StepRow) -> bool:
    run, step = row
    return step.step in run.window


STEPS: tuple[ExportColumn[StepRow], ...] = (
    ExportColumn("run", str, lambda row: row[0].id),
    *_of_step(Step),
    ExportColumn("in_window", bool, _in_window),
)
"""The exported columns of a step, as in ``metrics.jsonl``."""


def write_tables(
    ending: str,
    write: Callable[[Path, Sequence[ExportColumn[Any]], Iterator[Any]], None],
    runs: RunSource,
    folder: Path,
) -> Iterator[Path]:
    """Two files of a form, ``results`` and ``steps``; yields each when it is complete."""
    for name, columns, rows in (("results", RESULTS, runs()), ("steps", STEPS, step_rows(runs()))):
        path = folder / f"{name}.{ending}"
        with new_file(path) as partial:
            write(partial, columns, rows)
        yield path


def write_csv(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> None:
    """A value that is not known is empty; a number that is not finite is ``nan``, ``inf`` or ``-inf``."""
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        write_csv_rows(file, [column.name for column in columns], rows_of(columns, rows))


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


def write_jsonl(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> None:
    """JSON has no NaN: as in ``metrics.jsonl`` such a value is null, and ``not_finite`` has it as text."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows_of(columns, rows):
            numbers = ((name, value) for name, value in row.items() if isinstance(value, float))
            spoiled = {name: str(value) for name, value in numbers if not math.isfinite(value)}
            shown = {**row, **dict.fromkeys(spoiled), "not_finite": spoiled} if spoiled else row
            file.write(f"{json.dumps(shown, allow_nan=False)}\n")


def write_parquet(path: Path, columns: Sequence[ExportColumn[Row]], rows: Iterator[Row]) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(column.name, types[column.kind]) for column in columns])
    found = rows_of(columns, rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(found, ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))


def write_openmetrics(runs: RunSource, folder: Path) -> Iterator[Path]:
    """Write results as a text file, which the textfile collector of Prometheus' node exporter also reads.

    All metrics are gauges without a time: that collector refuses times, and has no other type in common.
    """
    path = folder / "llmb.prom"
    rows = list(rows_of(RESULTS, runs()))
    with new_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in _lines(rows))
    yield path


def _lines(rows: Sequence[Mapping[str, Scalar | None]]) -> Iterator[str]:
    """Yield the lines grouped by metric, as both formats require."""
    yield f"# TYPE {PREFIX}run gauge"
    yield from (f"{PREFIX}run{_labels(row, (*LABELS, *DESCRIBING))} 1" for row in rows)
    for name in (column.name for column in RESULTS if column.kind is float):
        values = [(row, value) for row in rows if (value := row[name]) is not None]
        yield from [f"# TYPE {PREFIX}{name} gauge"] if values else []
        yield from (f"{PREFIX}{name}{_labels(row, LABELS)} {_number(value)}" for row, value in values)
    yield "# EOF"


def _labels(row: Mapping[str, Scalar | None], names: Sequence[str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    texts = {name: str(value).translate(escapes) for name in names if (value := row[name]) is not None}
    return "{" + ",".join(f'{name}="{text}"' for name, text in texts.items()) + "}"


def _number(value: Scalar) -> str:
    """Format in full precision; non-finite values as both formats write them."""
    number = float(value)
    return repr(number) if math.isfinite(number) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]

# SPDX-License-Identifier: Apache-2.0
"""The columns of exported results and steps: one list, whatever the form. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from llmb.catalogue.records import PARALLEL, Convention, Window
from llmb.missing import Missing
from llmb.programs.conclude import EndedRun
from llmb.runs.recorded_identity import identity_of
from llmb.runs.steps import ExpertLoad, Fp8Counts, Step

Scalar = str | int | float | bool
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """A run that ended, as it is exported. ``steps`` is empty for a program that records none."""

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
    """A value of each row, or None where it is not known. The name has the unit."""

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
    """What is found along ``path``: fields of records, keys of mappings, and places in tuples, as numbers."""
    names = path.split(".")
    return ExportColumn(name, kind, lambda row: _at(row, names))


def _columns(path: str, kind: type[Scalar], *names: str) -> Iterator[Result]:
    """Fields of the record at ``path``, by their own names."""
    for name in names:
        yield _column(name, kind, f"{path}.{name}")


def _at(value: Any, names: Sequence[str]) -> Any:  # noqa: ANN401 (a value of any kind of record)
    """None below what is not known."""
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


_RECIPE, _RECORD, _RESULT = "run.plan.recipe", "run.record", "run.result"
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
"""What is exported of a run; the values are those of ``llmb result --json``, the settings those of its record."""


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
"""What is exported of each step, as ``metrics.jsonl`` has it."""

# SPDX-License-Identifier: Apache-2.0
"""The columns of exported results and steps: one list, whatever the form. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from llmb.catalogue.records import PARALLEL, Convention, Window
from llmb.programs.conclude import EndedRun
from llmb.runs.environment import Environment
from llmb.runs.recorded_identity import identity_of
from llmb.runs.result import PretendedRank
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


def _recipe(name: str, kind: type[Scalar] = str) -> Result:
    return ExportColumn(name, kind, lambda one: getattr(one.run.plan.recipe, name))


def _layout(name: str) -> Result:
    return ExportColumn(name, int, lambda one: getattr(one.run.plan.recipe.layout, name))


def _record(name: str) -> Result:
    return ExportColumn(name, str, lambda one: getattr(one.run.record, name))


def _figure(name: str, kind: type[Scalar] = float) -> Result:
    return ExportColumn(name, kind, lambda one: getattr(one.run.result, name))


def _seen(name: str) -> Result:
    """What the workers saw of the machine."""

    def value(one: ExportedRun) -> Scalar | None:
        environment: Environment | None = one.run.record.environment
        found: Scalar | None = getattr(environment, name) if environment else None
        return found

    return ExportColumn(name, str, value)


def _step_time(name: str, kind: type[Scalar] = float) -> Result:
    """A statistic of the window's steps."""

    def value(one: ExportedRun) -> Scalar | None:
        times = one.run.result.step_time_s
        found: Scalar | None = getattr(times, name) if times else None
        return found

    unit = "" if name in ("count", "cv") else "_s"
    return ExportColumn(f"step_time_{name}{unit}", kind, value)


def _step_time_limit(name: str, place: int) -> Result:
    """An end of the 95 % confidence interval of the mean."""

    def value(one: ExportedRun) -> float | None:
        times = one.run.result.step_time_s
        return times.ci95[place] if times and times.ci95 else None

    return ExportColumn(f"step_time_ci95_{name}_s", float, value)


def _by_convention(name: str) -> Iterator[Result]:
    for convention in Convention:

        def value(one: ExportedRun, key: str = convention.value) -> float | None:
            found: Mapping[str, float | None] = getattr(one.run.result, name) or {}
            return found.get(key)

        yield ExportColumn(f"{name}_{convention.value}", float, value)


def _loss(name: str) -> Result:
    return ExportColumn(f"loss_{name}", float, lambda one: one.run.result.loss and getattr(one.run.result.loss, name))


def _delta_pct(one: ExportedRun) -> float | None:
    verdict = one.run.result.verdict
    return verdict.delta_pct if verdict else None


def _published(one: ExportedRun) -> float | None:
    expected = next(iter(one.run.plan.recipe.expectations), None)
    return expected.step_time_s if expected else None


def _pretended(name: str, value: Callable[[PretendedRank], float | None]) -> Result:
    """A figure of a rank that ran alone."""

    def of_rank(one: ExportedRun) -> float | None:
        rank = one.run.result.pretended
        return value(rank) if rank else None

    return ExportColumn(name, float, of_rank)


def _nodes(one: ExportedRun) -> str | None:
    return " ".join(one.run.record.environment.nodes) if one.run.record.environment else None


RESULTS: tuple[Result, ...] = (
    ExportColumn("run", str, lambda one: one.id),
    _record("label"),
    ExportColumn("campaign", str, lambda one: one.campaign),
    *map(_recipe, ("workload", "size", "dtype", "gpu_type")),
    _recipe("scale", int),
    _recipe("proxy", bool),
    _recipe("pretended_rank", int),
    ExportColumn("identity", str, lambda one: identity_of(one.run.record).key),
    *map(_layout, ("gpus", *PARALLEL, "dp", "mbs", "gbs", "seq_len", "layers")),
    *map(_record, ("program", "llmb_version", "llmb_commit", "image", "started_at", "ended_at")),
    ExportColumn("nodes", str, _nodes),
    *map(_seen, ("device", "driver", "cuda", "nccl", "torch", "python")),
    _figure("status", str),
    _figure("reason", str),
    _figure("measurement_reason", str),
    _figure("steps", int),
    ExportColumn("window_first", int, lambda one: one.window.first),
    ExportColumn("window_last", int, lambda one: one.window.last),
    _step_time("count", int),
    *map(_step_time, ("mean", "median", "std", "cv", "min", "max")),
    _step_time_limit("low", 0),
    _step_time_limit("high", 1),
    ExportColumn("published_step_time_s", float, _published),
    ExportColumn("verdict", str, lambda one: one.run.result.verdict_name),
    ExportColumn("verdict_delta_pct", float, _delta_pct),
    *map(_figure, ("tokens_per_s", "tokens_per_s_per_gpu", "real_tokens_per_s")),
    *_by_convention("tflops_per_gpu"),
    *_by_convention("mfu_pct"),
    _figure("days_per_1t_tokens"),
    *map(_loss, ("first", "last")),
    _figure("peak_memory_gib"),
    _pretended("compute_time_mean_s", lambda rank: rank.compute_time_s.mean if rank.compute_time_s else None),
    _pretended("rank_peak_memory_gib", lambda rank: rank.peak_memory_gib),
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
            path = f"{prefix}{field.name}".split(".")
            yield ExportColumn("_".join(path), plain, lambda row, path=path: _at(row[1], path))  # type: ignore[misc]


def _at(value: Any, path: Sequence[str]) -> Any:  # noqa: ANN401 (a value of any kind of step)
    for name in path:
        value = None if value is None else getattr(value, name)
    return value


def _in_window(row: StepRow) -> bool:
    run, step = row
    return run.window.first <= step.step <= run.window.last


STEPS: tuple[ExportColumn[StepRow], ...] = (
    ExportColumn("run", str, lambda row: row[0].id),
    *_of_step(Step),
    ExportColumn("in_window", bool, _in_window),
)
"""What is exported of each step, as ``metrics.jsonl`` has it."""

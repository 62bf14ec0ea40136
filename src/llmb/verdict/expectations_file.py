# SPDX-License-Identifier: Apache-2.0
"""Files that runs are judged by: step times that a user expects, and acceptance sets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from llmb.base.errors import UsageError, see, unknown
from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.data_files import CatalogueError, compose_file, duplicate_keys, line_in, read_file
from llmb.catalogue.records import Convention, Dtype, Recipe, Record
from llmb.catalogue.resolve import CPU, LayoutSizes, Overrides, Request, resolve
from llmb.catalogue.throughput import throughput
from llmb.catalogue.window import DEFAULT_RULE, STEADY, check_rule
from llmb.runs.conditions import Values, condition_values
from llmb.runs.result import Interval, Reference
from llmb.verdict.judgement import Tolerance, default_tolerance

MOST_RATIO = 4.0
"""Limit of the ratio of step times in FP8 and BF16, to find misplaced decimal points (a factor of 10)."""


def _window(rule: str) -> str:
    if rule in (DEFAULT_RULE, STEADY):
        raise ValueError(f"'{rule}' depends on the run; use steps, such as 35-44")
    try:
        check_rule(f"{rule}-{rule}" if rule.isdecimal() else rule)
    except UsageError as error:
        raise ValueError(error.what) from error
    return rule


def _texts(found: object) -> object:
    return condition_values(found) if isinstance(found, dict) else found


class ExpectedStepTime(Record):
    """An expected step time, and the full or partial recipe of the runs that it applies to."""

    workload: str | None = None
    size: str | None = None
    dtype: Dtype | None = None
    gpu_type: str | None = None
    scale: int | None = None
    """Number of GPUs."""
    program: str | None = None
    data: str | None = None
    layout: LayoutSizes = LayoutSizes()
    step_time_s: float = Field(gt=0)
    step_time_s_ci95: Interval | None = None
    """95 % confidence interval of a measured step time."""
    tolerance_pct: float | None = Field(default=None, gt=0)
    window: Annotated[str, AfterValidator(_window)] | None = None
    """The steps that the step time averages, such as 35-44."""
    runs: int | None = Field(default=None, ge=1)
    """Number of measured runs."""
    source: str | None = None
    note: str | None = None
    conditions: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(default_factory=dict)
    """Other conditions of the step time, by dotted key. They do not select runs; a verdict lists differences."""

    @model_validator(mode="after")
    def _interval_fits(self) -> Self:
        low, high = self.step_time_s_ci95 or (0, inf)
        if not low <= self.step_time_s <= high:
            raise ValueError("step_time_s is outside of its interval, step_time_s_ci95")
        return self

    def recipe(self) -> dict[str, str]:
        """Return the conditions that select runs."""
        named = {"workload", "size", "dtype", "gpu_type", "program", "data"}
        layout = {f"layout.{name}": value for name, value in self.layout.model_dump().items()}
        return condition_values({**self.model_dump(mode="json", include=named), "layout.gpus": self.scale, **layout})


class ExpectationsFile(Record):
    """The content of a file for ``--expect``."""

    tolerance_pct: float | None = Field(default=None, gt=0)
    """Tolerance, in percent, of the entries that do not set one."""
    expectations: tuple[ExpectedStepTime, ...]


@dataclass(frozen=True, slots=True)
class ExpectationEntry:
    """An entry of a file of expectations, and its place there as ``path:line``."""

    expected: ExpectedStepTime
    where: str

    @property
    def values(self) -> Values:
        window = {"window": self.expected.window} if self.expected.window else {}
        return {**self.expected.conditions, **self.expected.recipe(), **window}

    @property
    def reference(self) -> Reference:
        expected = self.expected
        return Reference(
            kind="expectation",
            step_time_s=expected.step_time_s,
            step_time_s_ci95=expected.step_time_s_ci95,
            window_text=expected.window or "",
            source=": ".join(filter(None, (self.where, expected.source))),
            runs=expected.runs,
        )


@dataclass(frozen=True, slots=True)
class Expectations:
    path: Path
    tolerance_pct: float | None
    entries: tuple[ExpectationEntry, ...]

    @property
    def without_source(self) -> tuple[str, ...]:
        """Return the places of the entries without a source."""
        return tuple(entry.where for entry in self.entries if not entry.expected.source)

    def tolerance_of(self, entry: ExpectationEntry) -> Tolerance:
        if entry.expected.tolerance_pct is not None:
            return Tolerance(entry.expected.tolerance_pct, entry.where)
        if self.tolerance_pct is not None:
            return Tolerance(self.tolerance_pct, f"{self.path}: tolerance_pct")
        return default_tolerance("expectation")

    def entry_for(self, known: Values) -> ExpectationEntry | Missing:
        """Return the most specific entry that contradicts no ``known`` fact; Missing unless there is exactly one."""
        if not self.entries:
            return Missing(f"{self.path} has no entries")
        fitting = [entry for entry in self.entries if not list(_contradictions(entry, known))]
        if not fitting:
            near = min(self.entries, key=lambda entry: len(list(_contradictions(entry, known))))
            others = ", ".join(_contradictions(near, known))
            return Missing(f"no entry of {self.path} fits; {near.where} is for {others}")
        most = max(_confirmed(entry, known) for entry in fitting)
        best = [entry for entry in fitting if _confirmed(entry, known) == most]
        if len(best) > 1:
            return Missing(f"several entries fit: {', '.join(entry.where for entry in best)}")
        return best[0]


def _contradictions(entry: ExpectationEntry, known: Mapping[str, str]) -> Iterator[str]:
    for key, value in entry.expected.recipe().items():
        if known.get(key, value) != value:
            yield f"{key} {value}, not {known[key]}"


def _confirmed(entry: ExpectationEntry, known: Values) -> int:
    return sum(key in known for key in entry.expected.recipe())


def read_expectations(path: Path) -> Expectations:
    """Read a file of expectations; if it is invalid, raise UsageError with a list of its problems and their lines."""
    try:
        file = read_file(path, ExpectationsFile, foreign=True)
        root: Any = compose_file(path)
        if doubled := [f"{path}:{line}: duplicate key '{key}'" for line, key in duplicate_keys(root)]:
            raise CatalogueError(doubled)
    except CatalogueError as error:
        lines = "\n".join(f"  {problem}" for problem in error.problems)
        do = see("judge-a-run") if path.exists() else "pass an existing YAML file, or seconds, such as 12.4"
        raise UsageError(f"the file of expectations is invalid:\n{lines}", do=do) from error
    places = (f"{path}:{line_in(root, ('expectations', number))}" for number in range(len(file.expectations)))
    entries = tuple(map(ExpectationEntry, file.expectations, places))
    if problems := [*_too_fast(entries, Catalogue()), *_unlike_other_dtypes(entries)]:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UsageError(f"the file has impossible step times:\n{lines}", do="correct step_time_s or the recipe")
    return Expectations(path, file.tolerance_pct, entries)


def _too_fast(entries: Sequence[ExpectationEntry], catalogue: Catalogue) -> Iterator[str]:
    """The FLOPs with causal attention are the fewest that any program needs, unless weights are frozen."""
    for entry in entries:
        recipe, step_time_s = _recipe(entry.expected, catalogue), entry.expected.step_time_s
        if recipe is None or recipe.task != "pretrain" or recipe.peak_tflops is None:
            continue
        tflops = throughput(recipe, step_time_s).tflops_per_gpu[Convention.CAUSAL]
        if tflops and tflops > recipe.peak_tflops:
            yield (
                f"{entry.where}: step_time_s {step_time_s:g} would be {tflops:,.0f} TFLOPS per GPU; the dense"
                f" {recipe.dtype} peak of {recipe.gpu_type} is {recipe.peak_tflops:g}"
            )


def _recipe(expected: ExpectedStepTime, catalogue: Catalogue) -> Recipe | None:
    if not (expected.workload and expected.size and expected.dtype and expected.gpu_type and expected.scale):
        return None
    overrides = Overrides(**expected.layout.model_dump(exclude_none=True))
    request = Request(
        workload=expected.workload,
        size=expected.size,
        dtype=expected.dtype,
        gpu_type=expected.gpu_type,
        scale=expected.scale,
        overrides=overrides,
    )
    try:
        return resolve(catalogue, request)
    except UsageError:
        return None


def _unlike_other_dtypes(entries: Sequence[ExpectationEntry]) -> Iterator[str]:
    bf16 = {key: entry for entry in entries if entry.expected.dtype == "bf16" and (key := _but_for_dtype(entry))}
    for entry in entries:
        key = _but_for_dtype(entry)
        if entry.expected.dtype != "fp8" or key is None or key not in bf16:
            continue
        other = bf16[key]
        ratio = entry.expected.step_time_s / other.expected.step_time_s
        if not 1 / MOST_RATIO < ratio < MOST_RATIO:
            yield (
                f"{entry.where}: step_time_s of fp8 is {ratio:.2g} times that of bf16 ({other.where});"
                f" they are more than a factor of {MOST_RATIO:g} apart, so one is wrong"
            )


def _but_for_dtype(entry: ExpectationEntry) -> tuple[tuple[str, str], ...] | None:
    recipe = entry.expected.recipe()
    if recipe.get("gpu_type") == CPU:
        return None
    return tuple(sorted((key, value) for key, value in recipe.items() if key != "dtype"))


DATA = Path(__file__).with_name("acceptance.yaml")


class AcceptanceRecipe(Record):
    """A recipe that an acceptance set requires to be measured."""

    workload: str
    size: str
    dtype: Dtype
    scale: int

    @property
    def name(self) -> str:
        return f"{self.workload} {self.size} {self.dtype}"


class AcceptanceSet(Record):
    """The recipes with which a cluster of one GPU type must reach a share of the published throughput."""

    name: str
    title: str
    gpu_type: str
    pass_at_pct: float = Field(gt=0, le=100)
    """Percentage of the published throughput that a run must reach."""
    valid_months: int | None = None
    """Number of months for which the result is valid; None if not specified."""
    recipes: tuple[AcceptanceRecipe, ...]

    @property
    def tolerance(self) -> Tolerance:
        slower_pct = 100 * (100 / self.pass_at_pct - 1)
        return Tolerance(slower_pct, f"acceptance set {self.name}: {self.pass_at_pct:g} % of the published throughput")


class AcceptanceFile(Record):
    """The content of ``acceptance.yaml``."""

    sets: tuple[AcceptanceSet, ...]


@cache
def acceptance_sets() -> dict[str, AcceptanceSet]:
    return {one.name: one for one in read_file(DATA, AcceptanceFile, wrap="sets").sets}


def find_acceptance_set(name: str) -> AcceptanceSet:
    """Return the acceptance set with this name; raise UsageError if there is none."""
    sets = acceptance_sets()
    if name not in sets:
        raise unknown("acceptance set", name, sets)
    return sets[name]

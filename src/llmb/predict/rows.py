# SPDX-License-Identifier: Apache-2.0
"""Predictions of many layouts, a row each, as they are in a CSV file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.errors import LlmbError, UsageError
from llmb.predict.prediction import Calibration, Prediction, predict
from llmb.predict.step import Kept
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

RECIPE = ("workload", "size", "dtype", "gpu_type", "scale", "release")
SIZES = tuple(name for name in Layout.model_fields if name in Overrides.model_fields)
COLUMNS = (*RECIPE, "gpus", *(name for name in SIZES if name != "sequence_parallel"))
"""A file may lack all but ``workload`` and ``size``, or leave them empty."""


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """What a line asks for, and what is predicted of it, or why nothing is."""

    line: int
    asked: Mapping[str, str]
    found: Prediction | LlmbError


def predict_rows(
    catalogue: Catalogue, rows: Sequence[Mapping[str, str]], calibration: Calibration
) -> Iterator[PredictedRow]:
    """One that cannot be predicted takes no other with it. Raises UsageError for columns that there are not."""
    if rows and (unknown := set(rows[0]) - set(COLUMNS)):
        raise UsageError(f"unknown columns: {', '.join(sorted(map(str, unknown)))}", choices=COLUMNS)

    @cache
    def plan_of(*recipe: str) -> EnginePlan:
        values: dict[str, Any] = {name: value for name, value in zip(RECIPE, recipe, strict=True) if value}
        if "scale" in values:
            values["scale"] = _whole("scale", values["scale"])
        if missing := [name for name in ("workload", "size") if name not in values]:
            raise UsageError(f"{missing[0]} is missing")
        return make_plan(resolve(catalogue, Request(**values)), Choices(), device="cuda")

    kept: dict[tuple[object, ...], Kept] = {}
    for line, row in enumerate(rows, start=2):
        try:
            recipe = tuple(row.get(name) or "" for name in RECIPE)
            plan = with_layout(plan_of(*recipe), _sizes(row))
            gpu, alike = catalogue.gpus[plan.recipe.gpu_type], kept.setdefault(recipe, Kept())
            found: Prediction | LlmbError = predict(plan, gpu, calibration, catalogue.rates.errors, alike)
        except LlmbError as error:
            found = error
        yield PredictedRow(line, {name: text for name, text in row.items() if name in COLUMNS}, found)


def with_layout(plan: EnginePlan, changes: Mapping[str, int | None]) -> EnginePlan:
    """The plan with other sizes. Raises UsageError with all that is wrong with them."""
    recipe = plan.recipe
    layout = recipe.layout.model_copy(update=dict(changes))
    model = (
        recipe.model
        if layout.layers == recipe.model.layers
        else recipe.model.model_copy(update={"layers": layout.layers})
    )
    if problems := check_layout(model, layout):
        raise UsageError("; ".join(problems))
    recipe = recipe.model_copy(update={"layout": layout, "model": model, "scale": layout.gpus})
    return plan.model_copy(update={"recipe": recipe})


def _sizes(row: Mapping[str, str]) -> dict[str, int | None]:
    return {name: _whole(name, row[name]) for name in COLUMNS[len(RECIPE) :] if row.get(name)}


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name} is '{text}'; it must be a whole number") from error

# SPDX-License-Identifier: Apache-2.0
"""The published figures of a recipe at all scales, as a table and a JSON document."""

from collections.abc import Iterable, Sequence
from typing import Any

from llmb.catalogue.published import Expectation
from llmb.catalogue.records import Recipe
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table

LAYOUT = ("layers", "tp", "pp", "cp", "vp", "dp", "gbs", "ga")
SHOWN = ("layers", "tp", "pp", "cp", "vp", "gbs")
FIGURES = ("step_time_s", "tokens_per_s", "mfu_pct", "days_per_1t_tokens")
HEADERS = ("step s", "tokens/s", "MFU %", "days/1T")


def scales_document(recipes: Iterable[Recipe]) -> dict[str, Any]:
    """Every figure is as published; null with its reason where none is."""
    return {"scales": [_document(recipe) for recipe in recipes]}


def _document(recipe: Recipe) -> dict[str, Any]:
    identity = ("workload", "size", "dtype", "gpu_type", "scale", "release", "proxy")
    figure = _figure(recipe)
    return {
        **{name: getattr(recipe, name) for name in identity},
        "layout": {name: getattr(recipe.layout, name) for name in LAYOUT},
        "published": figure and figure.model_dump(mode="json"),
        "published_reason": recipe.expectations_reason,
    }


def scales_table(recipes: Sequence[Recipe]) -> Table:
    """One line for each scale of a dtype, as wide as a terminal of 80 columns."""
    first = recipes[0]
    title = f"{first.workload} {first.size} {first.dtype} on {first.gpu_type}, published figures"
    names = [name if name == "layers" else name.upper() for name in SHOWN]
    table = result_table(title, "GPUs", *names, *HEADERS, "", right=("GPUs", *names, *HEADERS))
    for column in table.columns:
        column.wrap = False
    for recipe in recipes:
        figure = _figure(recipe)
        values = [number(getattr(figure, name) if figure else None) for name in FIGURES]
        layout = [str(getattr(recipe.layout, name)) for name in SHOWN]
        table.add_row(str(recipe.scale), *layout, *values, "PROXY" if recipe.proxy else "")
    found = dict.fromkeys(
        f"{figure.source}, {figure.kind}, line {figure.line}" for figure in map(_figure, recipes) if figure
    )
    notes = [f"source: {source}" for source in found] or ["no figures are published"]
    if any(recipe.proxy for recipe in recipes):
        notes.append("PROXY: fewer layers than the model has; its figures are not those of the model")
    table.caption = "\n".join(notes)
    return table


def _figure(recipe: Recipe) -> Expectation | None:
    """Tables come before examples."""
    return next(iter(recipe.expectations), None)

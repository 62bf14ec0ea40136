# SPDX-License-Identifier: Apache-2.0
"""Repeats of recipes as tables and a JSON document."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmb.jobs.repeats import EndedRun, Spread, spread_of
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.run_report import run_document
from llmb.report.table import Table
from llmb.runs.short_id import short_id
from llmb.shown_text import printable


def repeats_document(recipes: Sequence[Sequence[EndedRun]], label: str | None) -> dict[str, Any]:
    """The JSON of ``llmb run`` with several runs; its keys are a contract. Recipes without a run are left out."""
    return {"label": label, "recipes": [_recipe_document(runs, label) for runs in recipes if runs]}


def _recipe_document(runs: Sequence[EndedRun], label: str | None) -> dict[str, Any]:
    spread = spread_of(_means(runs))
    return {
        "title": runs[0].plan.recipe.title(),
        "run_means_s": asdict(spread) if spread else None,
        "runs": [run_document(run.folder, run.plan, run.result, label) for run in runs],
    }


def repeats_tables(recipes: Sequence[Sequence[EndedRun]]) -> Iterator[Table]:
    """One table for each recipe that has a run."""
    for runs in filter(None, recipes):
        table = result_table(
            runs[0].plan.recipe.title(), "run", "status", "step s", "CV %", "verdict", "reason",
            right=("step s", "CV %"),
        )  # fmt: skip
        for run in runs:
            table.add_row(*_cells(run))
        spread = spread_of(_means(runs))
        table.caption = _spread_text(spread) if spread else "no run was successful"
        yield table


def _cells(run: EndedRun) -> Iterator[str]:
    times = run.result.step_time_s if run.mean_s is not None else None
    yield short_id(run.folder.path)
    yield run.result.status
    yield number(times.mean) if times else ""
    yield number(100 * times.cv) if times and times.cv is not None else ""
    yield run.result.verdict.verdict if run.result.verdict else ""
    yield printable(run.result.reason or (run.result.step_time_reason if not times else "") or "")


def _spread_text(spread: Spread) -> str:
    if spread.std is None:
        return f"1 successful run, {number(spread.mean)} s"
    return (
        f"mean of {spread.count} runs {number(spread.mean)} s, median {number(spread.median)} s, "
        f"std {number(spread.std)} s ({number(spread.cv_pct or 0)} %), "
        f"from {number(spread.min)} to {number(spread.max)} s"
    )


def _means(runs: Sequence[EndedRun]) -> list[float]:
    return [run.mean_s for run in runs if run.mean_s is not None]

# SPDX-License-Identifier: Apache-2.0
"""Runs of several recipes that were made in turn, one row each: what differs between them, and how fast each was."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from llmb.launch.programs.conclude import EndedRun
from llmb.report.table import Column, Table, known, number, number_column, table_of
from llmb.runs.conditions import identity_of_plan
from llmb.runs.plan import Plan
from llmb.runs.record import ENGINE

FP8, BF16 = "fp8", "bf16"


def varied_names(plans: Sequence[Plan]) -> list[str]:
    """For each plan what differs from others of the same title, such as ``mbs 2``; empty where nothing does.

    What follows from the title, such as a sharding from the number of GPUs, is not named.
    """
    titles = [plan.recipe.title() for plan in plans]
    parts = [_parts(plan) for plan in plans]
    values: dict[str, dict[str, set[str]]] = {}
    for title, part in zip(titles, parts, strict=True):
        for key, value in part.items():
            values.setdefault(key, {}).setdefault(title, set()).add(str(value))
    differing = [key for key, by_title in values.items() if any(len(some) > 1 for some in by_title.values())]
    named = [[(key.rpartition(".")[2], part[key]) for key in differing if part.get(key) is not None] for part in parts]
    return [", ".join(f"{name} {value}" for name, value in one) for one in named]


def _parts(plan: Plan) -> dict[str, Any]:
    """Parts of the identity, and what a repeat may not differ in either."""
    parts = dict(sorted(identity_of_plan(plan, ENGINE, {}).configuration.items()))
    return {**{key: value for key, value in parts.items() if key != "model"}, "steps": plan.steps, "seed": plan.seed}


def titles_of(plans: Sequence[Plan]) -> list[str]:
    """The title of each recipe, with what differs from the others."""
    titles = [plan.recipe.title() for plan in plans]
    return [f"{title} ({name})" if name else title for title, name in zip(titles, varied_names(plans), strict=True)]


def sweep_rows(recipes: Sequence[Sequence[EndedRun]]) -> list[dict[str, Any]]:
    """One row for each recipe that has a run; means are over its successful runs. The keys are a contract."""
    some = [runs for runs in recipes if runs]
    titles = titles_of([runs[0].plan for runs in some])
    rows = [{"title": title, **_row(runs)} for runs, title in zip(some, titles, strict=True)]
    first = rows[0]["step_time_s"] if rows else None
    for row in rows:
        own = row["step_time_s"]
        row["to_first_pct"] = 100 * (own / first - 1) if own and first else None
    return rows


def _row(runs: Sequence[EndedRun]) -> dict[str, Any]:
    good = [run for run in runs if run.mean_s is not None]
    statuses = {run.result.status for run in runs}
    return {
        "run": runs[0].record.id if len(runs) == 1 else None,
        "runs": len(runs),
        "status": next((name for name in ("failed", "cancelled", "invalid") if name in statuses), "success"),
        "step_time_s": _mean([run.mean_s for run in good]),
        "tokens_per_s": _mean([run.result.tokens_per_s for run in good]),
        "peak_memory_gib": max((run.result.peak_memory_gib or 0 for run in good), default=0) or None,
        "loss_last": _mean([run.result.loss.last if run.result.loss else None for run in good]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """None unless all are known."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(values) else None


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns: list[Column[dict[str, Any]]] = [
        Column("recipe", lambda row: row["title"]),
        Column("run", lambda row: row["run"] or "", optional=True),
        number_column("runs", lambda row: row["runs"], drop=3),
        Column("status", lambda row: row["status"], optional=True),
        number_column("step s", lambda row: row["step_time_s"], known),
        number_column("to first %", lambda row: row["to_first_pct"], known),
        number_column("tokens/s", lambda row: row["tokens_per_s"], known),
        number_column("peak GiB", lambda row: row["peak_memory_gib"], known, drop=2),
        number_column("last loss", lambda row: row["loss_last"], known, drop=1),
    ]
    return table_of("Side by side", rows, columns)


def fp8_sentences(recipes: Sequence[Sequence[EndedRun]]) -> Iterator[str]:
    """Whether FP8 is faster here: for each recipe in FP8 that another one differs from in BF16 alone."""
    some = [runs for runs in recipes if runs]
    pairs: dict[str, dict[str, dict[str, Any]]] = {}
    for runs, varied in zip(some, varied_names([runs[0].plan for runs in some]), strict=True):
        recipe = runs[0].plan.recipe
        same = ", ".join(filter(None, (f"{recipe.model_name} on {recipe.scale} x {recipe.gpu_type}", varied)))
        pairs.setdefault(same, {})[recipe.dtype.value] = _row(runs)
    for same, rows in pairs.items():
        fp8, bf16 = (rows.get(dtype, {}) for dtype in (FP8, BF16))
        if not fp8.get("step_time_s") or not bf16.get("step_time_s"):
            continue
        times = bf16["step_time_s"] / fp8["step_time_s"]
        text = f"FP8 is {'faster' if times > 1 else 'slower'} than BF16 here: {number(times)} times its speed"
        if fp8["loss_last"] is not None and bf16["loss_last"] is not None:
            text += f"; last loss {number(fp8['loss_last'])} instead of {number(bf16['loss_last'])}"
        yield f"{text} ({same})"

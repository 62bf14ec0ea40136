# SPDX-License-Identifier: Apache-2.0
"""Runs of several recipes as a table with one row per recipe: their differences and their speeds."""

import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from llmb.launch.programs.conclude import EndedRun
from llmb.reports.formats import cell, formatted, number
from llmb.reports.table import Column, Table, numbers, table_of, texts
from llmb.runs.conditions import identity_of_plan
from llmb.runs.plan import Plan
from llmb.runs.record import ENGINE

FP8, BF16 = "fp8", "bf16"
PARTS = re.compile(r"on \d+ x \S+|\S+")
"""Parts of a recipe's title: each word, and the GPUs as a whole."""


def varied_names(plans: Sequence[Plan]) -> list[str]:
    """Return each plan's values of the settings in which plans with the same title differ, such as ``mbs 2``.

    Values that follow from the title, such as the sharding for a number of GPUs, are not listed.
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
    """Return the configuration of a plan by key, without the model but with the number of steps and the seed."""
    parts = dict(sorted(identity_of_plan(plan, ENGINE, {}).configuration.items()))
    return {**{key: value for key, value in parts.items() if key != "model"}, "steps": plan.steps, "seed": plan.seed}


def titles_of(plans: Sequence[Plan]) -> list[str]:
    """Return the title of each plan, with the values that ``varied_names`` returns for it."""
    return [_with(plan.recipe.title(), name) for plan, name in zip(plans, varied_names(plans), strict=True)]


def _with(title: str, varied: str) -> str:
    return f"{title} ({varied})" if varied else title


def sweep_rows(recipes: Sequence[Sequence[EndedRun]]) -> list[dict[str, Any]]:
    """Return one row per recipe that has a run; means are over its runs with step times. The keys are a contract."""
    some = [runs for runs in recipes if runs]
    names = varied_names([runs[0].plan for runs in some])
    rows = [
        {"title": runs[0].plan.recipe.title(), "varied": name or None, **_row(runs)}
        for runs, name in zip(some, names, strict=True)
    ]
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
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per recipe. The common parts of the recipes' titles are in the table's title."""
    words = [PARTS.findall(row["title"]) for row in rows]
    common = {place: some[0] for place, some in enumerate(zip(*words, strict=False)) if len(set(some)) == 1}

    def name(row: dict[str, Any]) -> str:
        own = " ".join(word for place, word in enumerate(PARTS.findall(row["title"])) if place not in common)
        return ", ".join(filter(None, (own, row["varied"])))

    columns: list[Column[dict[str, Any]]] = [
        Column("recipe", name),
        *texts("run", optional=True, drop=3),
        *(numbers("runs") if any(row["runs"] > 1 for row in rows) else ()),
        *(texts("status") if any(row["status"] != "success" for row in rows) else ()),
        *numbers("step s: step_time_s", form=cell),
        *numbers("to first %: to_first_pct", form=formatted("{:.1f}")),
        *numbers("tokens/s: tokens_per_s", form=cell),
        *numbers("peak GiB: peak_memory_gib", form=cell, drop=2),
        *numbers("last loss: loss_last", form=cell, drop=1),
    ]
    return table_of(f"Side by side: {' '.join(common.values())}", rows, columns)


def fp8_sentences(recipes: Sequence[Sequence[EndedRun]]) -> Iterator[str]:
    """Yield a sentence on the speed-up of FP8 over BF16 for each recipe that was run in both."""
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

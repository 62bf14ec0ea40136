# SPDX-License-Identifier: Apache-2.0
"""Verdicts as tables and JSON documents."""

import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from llmb.analysis.judge_run import Judged
from llmb.analysis.measured import flaw_of
from llmb.analysis.records import AnalyzedRun, LeftOut
from llmb.report.explain_report import explanation_tables
from llmb.report.numbers import interval_of, number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.report.values import shortened
from llmb.shown_text import printable
from llmb.verdict.acceptance import AcceptanceSet
from llmb.verdict.causes import Explanation
from llmb.verdict.conditions import title_of, worth
from llmb.verdict.records import WORST, Condition, Verdict, worst
from llmb.verdict.sentence import percent

EFFECTS = {"prevents": "prevents a verdict", "weakens": "makes it soft", "noted": "only noted"}


def judge_document(
    judged: Sequence[Judged],
    left_out: Sequence[LeftOut],
    explanations: Sequence[Explanation | None] = (),
    acceptance: AcceptanceSet | None = None,
) -> dict[str, Any]:
    """The JSON of ``llmb judge``: the worst verdict with its own keys, and each; its keys are a contract.

    ``explanations``: one for each verdict, or none at all.
    """
    first = min((one.verdict for one in judged), key=lambda verdict: WORST.index(verdict.verdict))
    return {
        **first.model_dump(mode="json"),
        "acceptance": acceptance and acceptance.model_dump(mode="json"),
        "judged": [_judged_document(*pair) for pair in zip_longest(judged, explanations)],
        "left_out": left_out_document(left_out),
    }


def _judged_document(judged: Judged, explanation: Explanation | None) -> dict[str, Any]:
    return {
        **judged.verdict.model_dump(mode="json"),
        "recipe": judged.title,
        "step_time_s": judged.compared_s,
        "runs": [{"id": run.id, "path": str(run.path), "label": run.label} for run in judged.runs],
        "explanation": explanation and explanation.model_dump(mode="json"),
    }


def left_out_document(left_out: Sequence[LeftOut]) -> list[dict[str, str]]:
    return [{"run": one.run, "reason": one.reason} for one in left_out]


def verdict_tables(judged: Sequence[Judged], explanations: Sequence[Explanation | None] = ()) -> Iterator[Table]:
    """After each verdict its explanation, if there are any; after several a summary."""
    for one, explanation in zip_longest(judged, explanations):
        yield verdict_table(one)
        if explanation:
            yield from explanation_tables(explanation)
        elif explanations:
            yield result_table(f"why slow: not known, as {', '.join(run.id for run in one.runs)} has no step time", "")
    if len(judged) > 1:
        yield summary_table(judged)


def verdict_table(judged: Judged) -> Table:
    """The verdict and its sentence first, then both sides and what differs, then where all of it comes from."""
    verdict = judged.verdict
    soft = " (soft)" if verdict.soft and verdict.verdict not in ("invalid", "not comparable") else ""
    title = f"{verdict.verdict.upper()}{soft}: {printable(judged.title)}, {_counted(judged)}"
    table = result_table(f"{title}\n{printable(verdict.sentence)}", "", "run", "reference", "effect")
    table.caption = "\n".join(f"{name}: {printable(text)}" for name, text in _sources(judged))
    reference = verdict.reference
    if reference is None or verdict.verdict == "invalid":
        table.columns = table.columns[:1]
        return table
    table.add_row("step time s", number(judged.compared_s), number(reference.step_time_s))
    own = judged.step_time_s.ci95 if judged.step_time_s else None
    if own or reference.step_time_s_ci95:
        table.add_row("95 % interval s", interval_of(own), interval_of(reference.step_time_s_ci95))
    for condition in _two_sided(verdict):
        values = (shortened(value or "unknown") for value in (condition.own, condition.reference))
        table.add_row(title_of(condition.key), *values, f"{EFFECTS[condition.effect]}{worth(condition)}")
    return table


def summary_table(judged: Sequence[Judged]) -> Table:
    """A row per verdict, behind the tables of several."""
    title = f"{len(judged)} verdicts, the worst: {worst(one.verdict for one in judged)}"
    columns = ("run", "recipe", "step s", "reference", "difference", "verdict")
    table = result_table(title, *columns, right=columns[2:5])
    for one in judged:
        reference, delta = one.verdict.reference, one.verdict.delta_pct
        table.add_row(
            ", ".join(run.id for run in _counted_runs(one)),
            printable(one.title),
            number(one.compared_s),
            number(reference.step_time_s) if reference else "n/a",
            "n/a" if delta is None else f"{'+' if delta > 0 else ''}{percent(delta)} %",
            one.verdict.verdict,
        )
    return table


def _two_sided(verdict: Verdict) -> list[Condition]:
    """Without what is noted of one side only."""
    return [one for one in verdict.conditions if one.effect != "noted" or (one.own and one.reference)]


def _sources(judged: Judged) -> Iterator[tuple[str, str]]:
    verdict = judged.verdict
    if verdict.reference:
        yield "reference", verdict.reference.source
    if verdict.reference and verdict.reference.kind == "published":
        yield "what else differs", "llmb docs what-is-the-same"
    if verdict.reference and verdict.tolerance_pct is not None:
        yield "tolerance", f"{percent(verdict.tolerance_pct)} %: {verdict.tolerance_source}"
    for run in judged.runs if len(judged.runs) > 1 else ():
        if (flaw := flaw_of(run)) and verdict.verdict != "invalid":
            yield f"not counted: {run.id}", flaw
    for condition in verdict.conditions:
        if condition not in _two_sided(verdict):
            yield title_of(condition.key), str(condition.reference or condition.own)
    if len(judged.runs) == 1:
        yield "run folder" if judged.runs[0].record else "log", str(judged.runs[0].path)
    elif judged.runs:
        yield "runs below", os.path.commonpath([run.path for run in judged.runs])


def acceptance_table(wanted: AcceptanceSet, judged: Sequence[Judged]) -> Table:
    """A row per recipe; below, why one does not pass."""
    passed = [one for one in judged if one.verdict.verdict in ("pass", "improved")]
    title = f"Acceptance {wanted.name} ({wanted.title}): {len(passed)} of {len(judged)} recipes pass"
    columns = ("recipe", "GPUs", "runs", "step s", "published", "%", "verdict")
    table = result_table(title, *columns, right=columns[1:6])
    for recipe, one in zip(wanted.recipes, judged, strict=True):
        reference = one.verdict.reference
        table.add_row(
            recipe.name,
            str(recipe.scale),
            str(len(one.runs)),
            number(one.compared_s),
            number(reference.step_time_s) if reference else "n/a",
            _throughput_pct(one.verdict),
            one.verdict.verdict,
        )
    lines = [f"%: of the published throughput; a recipe passes at {wanted.pass_at_pct:g} %"]
    lines += [f"{one.title}: {printable(one.verdict.sentence)}" for one in judged if one not in passed and one.runs]
    if wanted.valid_months and len(passed) == len(judged):
        lines.append(f"the cluster is accepted, for {wanted.valid_months} months from these runs")
    if missing := sum(not one.runs for one in judged):
        lines.append(f"{missing} {'recipe has' if missing == 1 else 'recipes have'} no run among those that were named")
    table.caption = "\n".join(lines)
    return table


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    return [f"left out: {one.run}: {one.reason}" for one in left_out]


def _counted_runs(judged: Judged) -> Sequence[AnalyzedRun]:
    """Those that are measurements, if one is."""
    return [run for run in judged.runs if flaw_of(run) is None] or judged.runs


def _counted(judged: Judged) -> str:
    """The number and the ids of the runs."""
    runs = _counted_runs(judged)
    of = f" of {len(judged.runs)}" if len(runs) < len(judged.runs) else ""
    count = "run" if len(judged.runs) == 1 else f"{len(runs)}{of} runs"
    return f"{count} {', '.join(run.id for run in runs)}"


def _throughput_pct(verdict: Verdict) -> str:
    return "n/a" if verdict.delta_pct is None else f"{100 / (1 + verdict.delta_pct / 100):.1f}"

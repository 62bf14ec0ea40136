# SPDX-License-Identifier: Apache-2.0
"""Verdicts as tables and JSON documents."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from llmb.analysis.analyzed_run import AnalyzedRun, LeftOut, by_reason, flaw_of
from llmb.analysis.judge_run import Judged
from llmb.report.table import Column, Table, interval_of, number, number_column, result_table, shortened, table_of
from llmb.shown_text import printable
from llmb.verdict.causes import Cause, Explanation
from llmb.verdict.conditions import WORST, Condition, Verdict, title_of, worst, worth
from llmb.verdict.expectations_file import AcceptanceRecipe, AcceptanceSet
from llmb.verdict.sentence import headline, percent

EFFECTS = {"prevents": "prevents a verdict", "weakens": "makes it soft", "noted": "only noted"}
SIGNS = {"about": "", "at least": "≥ ", "at most": "≤ "}
READABLE = 24
"""Sentences in a narrower column are hard to read."""
NOTHING = "nothing that was measured costs 1 % of a step or more"


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
        "left_out": [{"run": one.run, "reason": one.reason} for one in left_out],
    }


def _judged_document(judged: Judged, explanation: Explanation | None) -> dict[str, Any]:
    return {
        **judged.verdict.model_dump(mode="json"),
        "recipe": judged.title,
        "step_time_s": judged.compared_s,
        "runs": [{"id": run.id, "path": str(run.path), "label": run.label} for run in judged.runs],
        "explanation": explanation and explanation.model_dump(mode="json"),
    }


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


def notebook_table(verdict: Verdict) -> Table:
    """A verdict alone: its sentence, the figures behind it, and what differs."""
    reference = verdict.reference
    table = result_table(headline(verdict), "", "run", "reference", "effect")
    if reference:
        table.add_row("reference step time s", "", number(reference.step_time_s), reference.source)
    if verdict.delta_pct is not None:
        table.add_row("change %", f"{verdict.delta_pct:+.2f}", "", "")
    if verdict.ci95_pct:
        table.add_row("95 % interval %", " to ".join(f"{limit:+.2f}" for limit in verdict.ci95_pct), "", "")
    if verdict.smallest_visible_change_pct is not None:
        smallest = percent(verdict.smallest_visible_change_pct, 2)
        table.add_row("smallest change that would have shown %", smallest, "", "")
    if verdict.tolerance_pct is not None:
        table.add_row("tolerance %", "", number(verdict.tolerance_pct), verdict.tolerance_source or "")
    for condition in verdict.conditions:
        table.add_row(condition.key, condition.own or "unknown", condition.reference or "unknown", condition.effect)
    return table


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
    columns: list[Column[Judged]] = [
        Column("run", lambda one: ", ".join(run.id for run in _counted_runs(one))),
        Column("recipe", lambda one: one.title),
        number_column("step s", lambda one: one.compared_s),
        number_column("reference", _reference_s),
        number_column("difference", _difference, str),
        Column("verdict", lambda one: one.verdict.verdict),
    ]
    return table_of(title, judged, columns)


def _reference_s(judged: Judged) -> float | None:
    return judged.verdict.reference.step_time_s if judged.verdict.reference else None


def _difference(judged: Judged) -> str:
    delta = judged.verdict.delta_pct
    return "n/a" if delta is None else f"{'+' if delta > 0 else ''}{percent(delta)} %"


def _two_sided(verdict: Verdict) -> list[Condition]:
    """Without what is noted of one side only."""
    return [one for one in verdict.conditions if one.effect != "noted" or (one.own and one.reference)]


def _reference_sources(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.reference:
        yield "reference", verdict.reference.source
    if verdict.reference and verdict.reference.kind == "published":
        yield "what else differs", "llmb docs what-is-the-same"
    if verdict.reference and verdict.tolerance_pct is not None:
        yield "tolerance", f"{percent(verdict.tolerance_pct)} %: {verdict.tolerance_source}"


def _sources(judged: Judged) -> Iterator[tuple[str, str]]:
    verdict = judged.verdict
    yield from _reference_sources(verdict)
    for run in judged.runs if len(judged.runs) > 1 else ():
        if (flaw := flaw_of(run)) and verdict.verdict != "invalid":
            yield f"not counted: {run.id}", flaw
    for condition in verdict.conditions:
        if condition not in _two_sided(verdict):
            yield title_of(condition.key), str(condition.reference or condition.own)
    if len(judged.runs) == 1 and judged.runs[0].record is None:
        yield "log", str(judged.runs[0].path)
    elif len(judged.runs) > 1:
        yield "runs below", os.path.commonpath([run.path for run in judged.runs])


def acceptance_table(acceptance: AcceptanceSet, judged: Sequence[Judged]) -> Table:
    """A row per recipe; below, why one does not pass."""
    passed = [one for one in judged if one.verdict.verdict in ("pass", "improved")]
    title = f"Acceptance {acceptance.name} ({acceptance.title}): {len(passed)} of {len(judged)} recipes pass"
    columns: list[Column[tuple[AcceptanceRecipe, Judged]]] = [
        Column("recipe", lambda pair: pair[0].name),
        number_column("GPUs", lambda pair: pair[0].scale, str),
        number_column("runs", lambda pair: len(pair[1].runs), str),
        number_column("step s", lambda pair: pair[1].compared_s),
        number_column("published", lambda pair: _reference_s(pair[1])),
        number_column("%", lambda pair: _throughput_pct(pair[1].verdict), str),
        Column("verdict", lambda pair: pair[1].verdict.verdict),
    ]
    table = table_of(title, zip(acceptance.recipes, judged, strict=True), columns)
    lines = [f"%: of the published throughput; a recipe passes at {acceptance.pass_at_pct:g} %"]
    lines += [f"{one.title}: {printable(one.verdict.sentence)}" for one in judged if one not in passed and one.runs]
    if acceptance.valid_months and len(passed) == len(judged):
        lines.append(f"the cluster is accepted, for {acceptance.valid_months} months from these runs")
    if missing := sum(not one.runs for one in judged):
        lines.append(f"{missing} {'recipe has' if missing == 1 else 'recipes have'} no run among those that were named")
    table.caption = "\n".join(lines)
    return table


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """One for each reason: what a development version left may be dozens of runs."""
    groups = by_reason(left_out).items()
    return [f"left out: {_first_of(runs)}: {reason}" for reason, runs in groups]


def _first_of(runs: Sequence[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{len(runs)} runs, such as {runs[0]}"


def _counted_runs(judged: Judged) -> Sequence[AnalyzedRun]:
    """The runs that are measurements, if any is."""
    return [run for run in judged.runs if flaw_of(run) is None] or judged.runs


def _counted(judged: Judged) -> str:
    """The number and the ids of the runs."""
    runs = _counted_runs(judged)
    of = f" of {len(judged.runs)}" if len(runs) < len(judged.runs) else ""
    count = "run" if len(judged.runs) == 1 else f"{len(runs)}{of} runs"
    return f"{count} {', '.join(run.id for run in runs)}"


def _throughput_pct(verdict: Verdict) -> str:
    return "n/a" if verdict.delta_pct is None else f"{100 / (1 + verdict.delta_pct / 100):.1f}"


def explanation_tables(explanation: Explanation) -> list[Table]:
    """The causes with their commands, and what is not known."""
    tables = [_causes_table(explanation)]
    if explanation.not_known:
        tables.append(_unknown_table(explanation))
    if explanation.predicted_s:
        tables.append(_predicted_table(explanation.predicted_s, explanation.step_time_s))
    return tables


def _predicted_table(predicted_s: Mapping[str, float], measured_s: float) -> Table:
    """Parts that take a hundredth of the step or more, the longest first."""
    seconds = sum(predicted_s.values())
    parts = sorted(predicted_s.items(), key=lambda each: -each[1])
    table = table_of(
        "what a step was predicted to consist of",
        [each for each in parts if each[1] >= seconds / 100],
        [
            Column("part", lambda each: each[0]),
            number_column("s/step", lambda each: each[1]),
            Column("%", lambda each: f"{100 * each[1] / seconds:.0f}", right=True),
        ],
    )
    table.caption = f"predicted {number(seconds)} s, measured {number(measured_s)} s"
    return table


def _causes_table(explanation: Explanation) -> Table:
    table = result_table("why slow", "cause", "s/step", "%", "evidence", right=("s/step", "%"))
    for name in ("s/step", "%"):
        next(column for column in table.columns if column.header == name).wrap = False
    for cause in explanation.causes:
        between = [] if cause.in_step else ["between steps, not part of the step time"]
        first, *others = [*cause.evidence, *between]
        table.add_row(cause.title, *_cause_share(cause), printable(first))
        for line in others:
            table.add_row("", "", "", printable(line))
    if not explanation.causes:
        table.add_row(NOTHING, "", "", "")
    table.caption = "\n".join(_cause_notes(explanation))
    return table


def _cause_share(cause: Cause) -> tuple[str, str]:
    if cause.share_s is None or cause.share_pct is None:
        return "?", "?"
    sign = SIGNS[cause.bound]
    return f"{sign}{number(cause.share_s)}", f"{sign}{cause.share_pct:.0f}"


def _cause_notes(explanation: Explanation) -> list[str]:
    notes = [f"a step takes {number(explanation.step_time_s)} s"]
    if explanation.gap_s is not None:
        more = "longer" if explanation.gap_s > 0 else "less"
        gap = f"{number(abs(explanation.gap_s))} s {more} than the {number(explanation.reference_s)} s of"
        notes = [f"{notes[0]}, {gap} {printable(explanation.reference)}"]
    if explanation.unexplained_s is not None:
        notes.append(f"{number(explanation.unexplained_s)} s of that are not explained")
    notes += [f"to confirm {cause.title}: {printable(cause.confirm)}" for cause in explanation.causes]
    return notes


def _unknown_table(explanation: Explanation) -> Table:
    table = result_table("not known from this run", "cause", "why", "what tells")
    for column in table.columns[1:]:
        column.min_width = READABLE
    for unknown in explanation.not_known:
        table.add_row(unknown.title, unknown.reason, printable(unknown.confirm))
    return table

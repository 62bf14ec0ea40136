# SPDX-License-Identifier: Apache-2.0
"""Verdicts, and comparisons of two groups of runs, as tables, Markdown, CSV and JSON documents."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from llmb.base.shown_text import counted, listed, printable
from llmb.reports.formats import interval_of, number, shortened
from llmb.reports.predict_report import waterfall
from llmb.reports.table import (
    Column,
    Table,
    csv_text,
    fields_of,
    getter,
    markdown_table,
    markdown_text,
    numbers,
    rows_table,
    table_of,
    texts,
)
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun, by_reason, flaw_of
from llmb.runs.conditions import Difference, title_of, worth
from llmb.runs.result import WORST, Condition, Verdict
from llmb.verdict.compare_runs import Comparison, Row, Unmatched
from llmb.verdict.expectations_file import AcceptanceRecipe, AcceptanceSet
from llmb.verdict.explain_run import Explanation
from llmb.verdict.judge_run import Judged
from llmb.verdict.judgement import headline, percent

EFFECTS = {"prevents": "prevents a verdict", "weakens": "makes it soft", "noted": "only noted"}
SIGNS = {"about": "", "at least": "≥ ", "at most": "≤ "}
READABLE = 24
"""The width below which sentences in a column are hard to read."""
SIDES = ("", "run", "reference", "effect")
NOTHING = "no measured cause costs 1 % of a step or more"


def judge_document(
    judged: Sequence[Judged],
    left_out: Sequence[ExcludedRun],
    explanations: Sequence[Explanation | None] = (),
    acceptance: AcceptanceSet | None = None,
) -> dict[str, Any]:
    """Return the JSON of ``llmb judge``: the worst verdict's keys, and a list of all verdicts; its keys are a contract.

    ``explanations`` contains an explanation or None for each verdict, or is empty.
    """
    first = min((one.verdict for one in judged), key=lambda verdict: WORST.index(verdict.verdict))
    return {
        **first.model_dump(mode="json"),
        "acceptance": acceptance,
        "judged": [
            {
                **one.verdict.model_dump(mode="json"),
                **fields_of(one, "recipe: title", "step_time_s: compared_s"),
                "runs": [fields_of(run, "id", "label", "path") for run in one.runs],
                "explanation": explanation,
            }
            for one, explanation in zip_longest(judged, explanations)
        ],
        "left_out": left_out,
    }


def verdict_tables(
    judged: Sequence[Judged], explanations: Sequence[Explanation | None] = (), *, verbose: bool = True
) -> Iterator[Table]:
    """Yield a table per verdict. For several verdicts, yield a summary, and the tables if ``verbose`` or explained."""
    if len(judged) > 1:
        yield summary_table(judged, verbose=verbose)
    for one, explanation in zip_longest(judged, explanations) if verbose or explanations or len(judged) == 1 else ():
        yield verdict_table(one)
        if explanation:
            yield from explanation_tables(explanation)
        elif explanations:
            yield rows_table(f"why slow: unknown without a step time: {', '.join(run.id for run in one.runs)}", [""])


def notebook_table(verdict: Verdict) -> Table:
    """Return a table of one verdict: its sentence, the values behind it, and the differences."""
    reference, rows = verdict.reference, list[tuple[str, ...]]()
    if reference:
        rows.append(("reference step time s", "", number(reference.step_time_s), reference.source))
    if verdict.delta_pct is not None:
        rows.append(("change %", f"{verdict.delta_pct:+.2f}", "", ""))
    if verdict.ci95_pct:
        rows.append(("95 % interval %", " to ".join(f"{limit:+.2f}" for limit in verdict.ci95_pct), "", ""))
    if verdict.smallest_visible_change_pct is not None:
        smallest = percent(verdict.smallest_visible_change_pct, 2)
        rows.append(("smallest change that would have shown %", smallest, "", ""))
    if verdict.tolerance_pct is not None:
        rows.append(("tolerance %", "", number(verdict.tolerance_pct), verdict.tolerance_source or ""))
    rows += ((one.key, one.own or "unknown", one.reference or "unknown", one.effect) for one in verdict.conditions)
    return rows_table(headline(verdict), SIDES, rows)


def verdict_table(judged: Judged) -> Table:
    """Return the verdict's table: the sentence, recipe and runs, both sides, the differences, and the sources."""
    verdict = judged.verdict
    title = f"{printable(headline(verdict))}\n{printable(judged.title)}, {_counted(judged)}"
    caption = [f"{name}: {printable(text)}" for name, text in _sources(judged)]
    reference = verdict.reference
    if reference is None or verdict.verdict == "invalid":
        return rows_table(title, SIDES[:1], caption=caption)
    rows: list[tuple[str, ...]] = [("step time s", number(judged.compared_s), number(reference.step_time_s))]
    own = judged.times.ci95 if judged.times else None
    if own or reference.step_time_s_ci95:
        rows.append(("95 % interval s", interval_of(own), interval_of(reference.step_time_s_ci95)))
    for condition in _two_sided(verdict):
        values = (shortened(value or "unknown") for value in (condition.own, condition.reference))
        rows.append((title_of(condition.key), *values, f"{EFFECTS[condition.effect]}{worth(condition)}"))
    return rows_table(title, SIDES, rows, caption=caption)


def summary_table(judged: Sequence[Judged], *, verbose: bool) -> Table:
    """Return a table with one row per recipe, the worst first. Unless ``verbose``, a caption explains bad verdicts."""
    by_recipe: dict[str, list[Judged]] = {}
    for one in sorted(judged, key=lambda one: WORST.index(one.verdict.verdict)):
        by_recipe.setdefault(one.title, []).append(one)
    columns: list[Column[list[Judged]]] = [
        *texts("recipe: 0.title"),
        Column("runs", lambda row: listed(run.id for one in row for run in _counted_runs(one)), drop=1),
        Column("step s", lambda row: _span(row, "compared_s", number), right=True),
        Column("reference", lambda row: _span(row, "verdict.reference.step_time_s", number), right=True),
        Column("change %", lambda row: _span(row, "verdict.delta_pct", "{:+.1f}".format), right=True),
        Column("verdict", _verdict_counts),
    ]
    unsure = [row[0] for row in by_recipe.values() if row[0].verdict.verdict not in ("pass", "improved")]
    lines = [f"{one.title}: {headline(one.verdict)}" for one in unsure]
    caption = () if verbose else (*map(printable, lines), "-v shows each verdict, with what differs")
    title = f"{len(judged)} verdicts: {_verdict_counts(judged)}"
    return table_of(title, by_recipe.values(), columns, caption=caption)


def _verdict_counts(judged: Sequence[Judged]) -> str:
    counts = Counter(one.verdict.verdict for one in judged)
    return ", ".join(f"{counts[name]} {name}" if len(judged) > 1 else name for name in WORST if counts[name])


def _span(judged: Iterable[Judged], path: str, form: Callable[[float], str]) -> str:
    shown = [form(value) for value in sorted(value for value in map(getter(path), judged) if value is not None)]
    return " to ".join(dict.fromkeys((shown[0], shown[-1]))) if shown else "n/a"


def _two_sided(verdict: Verdict) -> list[Condition]:
    """Return the conditions that affect the verdict, and others with a value on both sides."""
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
    if len(judged.runs) == 1 and judged.runs[0].record is None:
        yield "log", str(judged.runs[0].path)
    elif len(judged.runs) > 1:
        yield "runs below", os.path.commonpath([run.path for run in judged.runs])


def acceptance_table(acceptance: AcceptanceSet, judged: Sequence[Judged]) -> Table:
    """Return a table with one row per recipe; below are the reasons why some do not pass."""
    passed = [one for one in judged if one.verdict.verdict in ("pass", "improved")]
    title = f"Acceptance {acceptance.name} ({acceptance.title}): {len(passed)} of {len(judged)} recipes pass"
    columns: list[Column[tuple[AcceptanceRecipe, Judged]]] = [
        *texts("recipe: 0.name"),
        *numbers("GPUs: 0.scale", form=str),
        *numbers("runs: 1.runs", form=lambda runs: str(len(runs))),
        *numbers("step s: 1.compared_s", "published: 1.verdict.reference.step_time_s"),
        *numbers("%: 1.verdict.delta_pct", form=lambda pct: "n/a" if pct is None else f"{100 / (1 + pct / 100):.1f}"),
        *texts("verdict: 1.verdict.verdict"),
    ]
    lines = [f"%: of the published throughput; a recipe passes at {acceptance.pass_at_pct:g} %"]
    lines += [f"{one.title}: {printable(one.verdict.sentence)}" for one in judged if one not in passed and one.runs]
    if acceptance.valid_months and len(passed) == len(judged):
        lines.append(f"the cluster is accepted, for {acceptance.valid_months} months from these runs")
    if missing := sum(not one.runs for one in judged):
        lines.append(f"{missing} {'recipe has' if missing == 1 else 'recipes have'} no run among those that were named")
    return table_of(title, zip(acceptance.recipes, judged, strict=True), columns, caption=lines)


def left_out_lines(left_out: Sequence[ExcludedRun]) -> list[str]:
    """Return one line per reason, with only one of its runs, because there may be dozens."""
    groups = by_reason(left_out).items()
    several = "{} runs, such as {}"
    return [f"left out: {runs[0] if len(runs) == 1 else several.format(len(runs), runs[0])}: {w}" for w, runs in groups]


def _counted_runs(judged: Judged) -> Sequence[AnalyzedRun]:
    return [run for run in judged.runs if flaw_of(run) is None] or judged.runs


def _counted(judged: Judged) -> str:
    runs = _counted_runs(judged)
    of = f" of {len(judged.runs)}" if len(runs) < len(judged.runs) else ""
    count = "run" if len(judged.runs) == 1 else f"{len(runs)}{of} runs"
    return f"{count} {', '.join(run.id for run in runs)}"


def explanation_tables(explanation: Explanation) -> list[Table]:
    """Return tables of the causes of slowness, of unknown causes, and of the predicted step."""
    tables = [_causes_table(explanation)]
    if explanation.not_known:
        columns = [*texts("cause: title"), *texts("why: reason", "how to confirm: confirm", min_width=READABLE)]
        tables.append(table_of("unknown for this run", explanation.not_known, columns))
    if terms := explanation.predicted_s:
        caption = f"predicted {number(sum(terms.values()))} s, measured {number(explanation.step_time_s)} s"
        tables.append(waterfall("what a step was predicted to consist of", terms, caption))
    return tables


def _causes_table(explanation: Explanation) -> Table:
    rows = [] if explanation.causes else [(NOTHING, "", "", "")]
    for cause in explanation.causes:
        between = [] if cause.in_step else ["between steps, not part of the step time"]
        first, *others = [*cause.evidence, *between]
        sign, seconds, pct = SIGNS[cause.bound], cause.share_s, cause.share_pct
        share = ("?", "?") if seconds is None or pct is None else (f"{sign}{number(seconds)}", f"{sign}{pct:.0f}")
        rows += [(cause.title, *share, first), *(("", "", "", line) for line in others)]
    notes = [f"a step takes {number(explanation.step_time_s)} s"]
    if explanation.gap_s is not None:
        more = "longer" if explanation.gap_s > 0 else "less"
        gap = f"{number(abs(explanation.gap_s))} s {more} than the {number(explanation.reference_s)} s of"
        notes = [f"{notes[0]}, {gap} {printable(explanation.reference)}"]
    if explanation.unexplained_s is not None:
        notes.append(f"{number(explanation.unexplained_s)} s of that are not explained")
    notes += [f"to confirm {cause.title}: {printable(cause.confirm)}" for cause in explanation.causes]
    columns = [*texts("cause: 0"), *texts("s/step: 1", "%: 2", right=True, wrap=False), *texts("evidence: 3")]
    return table_of("why slow", rows, columns, caption=notes)


CSV_COLUMNS = (
    *("recipe", "n_before", "n_after", "before_s", "after_s", "delta_pct"),
    *("ci95_low_pct: ci95_pct.0", "ci95_high_pct: ci95_pct.1"),
    *("noise_pct", "verdict", "tolerance_pct", "measure", "speed_up", "scaling", "more_runs", "reason", "soft"),
    "smallest_visible_change_pct",
)
MOST_DIGITS = 4
MOST_RUNS = 6
"""The maximum number of runs to list in a table row; the JSON document lists all."""


def compare_tables(comparison: Comparison) -> list[Table]:
    """Return tables of the compared recipes, the differences, the recipes on one side only, and the skipped runs."""
    columns: list[Column[Row]] = [
        # A recipe may be wrapped, so that a row fits into 80 columns.
        *texts("recipe", label=False),
        Column("runs", lambda row: f"{row.n_before} / {row.n_after}", str, right=True),
        *numbers("before (s): before_s", "after (s): after_s"),
        Column("change (%)", _change, str, right=True),
        *numbers("95 % interval: ci95_pct", form=interval_pct),
        *numbers("noise (%): noise_pct", form=_noise),
        Column("verdict", _verdict),
    ]
    notes = map(printable, _notes(comparison))
    tables = [table_of(printable(_answer(comparison)), comparison.rows, columns, caption=notes)]
    if comparison.differences:
        tables.append(_differences_table(comparison.differences))
    if comparison.unmatched:
        sides: list[Column[Unmatched]] = [
            *texts("recipe", "side"),
            *texts("runs", form=lambda runs: str(len(runs))),
            Column("differs from the nearest", _unmatched_text, optional=True),
        ]
        tables.append(table_of("Recipes without a counterpart", comparison.unmatched, sides))
    groups: dict[tuple[str, str], list[str]] = {}
    for one in comparison.left_out:
        groups.setdefault((one.side, one.reason), []).append(one.run)
    if groups:
        rows = [(side, listed(runs, MOST_RUNS), reason) for (side, reason), runs in groups.items()]
        tables.append(table_of("Runs left out", rows, texts("side: 0", "runs: 1", "reason: 2")))
    return tables


def _unmatched_text(one: Unmatched) -> str:
    differs = (f"{key.key} ({shortened(key.before)}, {shortened(key.after)})" for key in one.differs)
    return one.reason or ", ".join(differs)


def _answer(comparison: Comparison) -> str:
    before, after, rows = comparison.before, comparison.after, comparison.rows
    varied = f"{before}, varying {', '.join(comparison.vary)}"
    if len(rows) != 1 or rows[0].delta_pct is None:
        sides = varied if before == after else f"{after} against {before}"
        of = sum(row.verdict == comparison.verdict for row in rows)
        return f"{comparison.verdict.upper()}: {of} of {counted(len(rows), 'recipe')}, {sides}"
    (row,) = rows
    interval = f" (95 % interval {interval_pct(row.ci95_pct)} %)" if row.ci95_pct else ""
    change = f"{_change(row).lstrip('+-')} % {'slower' if rows[0].delta_pct > 0 else 'faster'}"
    what = f"{varied}: {change}" if before == after else f"{after} is {change} than {before}"
    return f"{comparison.verdict.upper()}: {what}{interval}, tolerance {row.tolerance_pct:g} %"


def interval_pct(interval: tuple[float, float] | None) -> str:
    return " to ".join(map(signed_pct, interval)) if interval else "n/a"


def _verdict(row: Row) -> str:
    return f"{row.verdict} (soft)" if row.soft and row.verdict in ("pass", "regressed", "improved") else row.verdict


def _change(row: Row) -> str:
    """Format the change with enough digits to distinguish it from the tolerance, such as +3.04 from 3 %."""
    delta, limit = row.delta_pct, row.tolerance_pct
    if delta is None:
        return signed_pct(None)
    same = (n for n in range(1, MOST_DIGITS) if (round(abs(delta), n) > limit) == (abs(delta) > limit))
    return f"{delta:+.{next(same, MOST_DIGITS)}f}"


def _noise(percent: float | None) -> str:
    return "n/a" if percent is None else f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"


def signed_pct(percent: float | None) -> str:
    return "n/a" if percent is None else f"{round(percent, 1) + 0.0:+.1f}"


def _notes(comparison: Comparison) -> Iterator[str]:
    if not comparison.rows:
        yield "No recipe was measured on both sides."
        return
    yield "Times are medians of the runs' means; noise is the spread between repeats; above 0 is slower."
    yield from dict.fromkeys(f"Tolerance {row.tolerance_pct:g} %: {row.tolerance_source}." for row in comparison.rows)
    named = len(comparison.rows) > 1
    for row in comparison.rows:
        for note in _row_notes(row):
            yield f"{row.recipe}: {note}" if named else f"{note[0].upper()}{note[1:]}"


def _row_notes(row: Row) -> Iterator[str]:
    if row.reason:
        yield f"{row.reason}."
    if row.smallest_visible_change_pct is not None and row.verdict in ("pass", "inconclusive"):
        yield f"a change of {_noise(row.smallest_visible_change_pct)} % would have shown."
    if row.more_runs:
        yield f"{counted(row.more_runs, 'more run')} in total on both sides would settle it."
    elif row.verdict == "inconclusive":
        yield "the noise is too large, or the difference too close to the tolerance, for a few more runs to settle it."
    if row.measure == "gpu_time_per_token":
        yield "a step is not the same work on both sides: the change is that of the GPU time per token."
    if row.scaling and row.speed_up is not None:
        yield f"{row.scaling} scaling, efficiency {100 * row.speed_up:.1f} %."
    elif row.speed_up is not None and "->" in row.recipe:
        yield f"speed-up {row.speed_up:.3f} (throughput per GPU)."


def _differences_table(differences: Sequence[Difference]) -> Table:
    """Return a table of the differences between known values. The caption lists values that only one side has."""
    columns = [*texts("key"), *texts("before", "after", form=shortened)]
    both = [one for one in differences if one.before is not None and one.after is not None]
    single = []
    for one in differences:
        if one not in both:
            side, value = ("before", one.before) if one.after is None else ("after", one.after)
            single.append(f"{printable(one.key)} ({side}: {shortened(value)})")
    caption = f"Known only for one side: {'; '.join(single)}." if single else ""
    return table_of("What differs in the records", both, columns if both else columns[:1], caption=caption)


def compare_markdown(comparison: Comparison) -> str:
    """Format the comparison as tables for a GitHub pull request."""
    rows, *others = compare_tables(comparison)
    parts = [f"**{markdown_text(rows.title)}**\n", markdown_table(rows)]
    parts += [f"{markdown_text(line)}\n" for line in (rows.caption or "").split("\n") if line]
    folded = "<details><summary>{}</summary>\n\n{}\n</details>\n"
    parts += [folded.format(markdown_text(table.title), markdown_table(table)) for table in others]
    return "\n".join(parts)


def compare_csv(comparison: Comparison) -> str:
    """Format the comparison as CSV, with one line per compared recipe; an unknown value is an empty field."""
    return csv_text(texts(*CSV_COLUMNS), comparison.rows)

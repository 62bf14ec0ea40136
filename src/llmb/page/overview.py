# SPDX-License-Identifier: Apache-2.0
"""Figures of several runs: recipes beside their references, throughput by scale, and the history of a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of
from llmb.analysis.judge_run import Judged
from llmb.metrics.anomalies import Level, changes_pct, find_levels
from llmb.metrics.statistics import Statistics
from llmb.missing import Missing
from llmb.page.charts import (
    BESIDE,
    Estimate,
    Line,
    Marked,
    estimates_chart,
    history_chart,
    points_of,
    series_chart,
)
from llmb.page.drawing import BLUE
from llmb.page.figures import Beside, Figure, figures_beside
from llmb.report.jobs_report import local_time, short_time
from llmb.report.table import cut, interval_of, known, number, result_table
from llmb.runs.conditions import known_differences
from llmb.verdict.conditions import rule_of
from llmb.verdict.sentence import percent

FEWEST = 2
"""Recipes, or scales, that are compared in a plot; of one a sentence says as much."""
LONGEST_LABEL = 40


def differences_figure(judged: Mapping[str, Judged]) -> Figure | None:
    """Verdicts by title. None if fewer than two have a difference."""
    shown = [(title, one) for title, one in judged.items() if one.verdict.delta_pct is not None]
    if len(shown) < FEWEST:
        return None
    right = ("difference %", "from %", "to %", "would show %")
    table = result_table("Step time relative to the reference", "recipe", *right, "verdict", "reference", right=right)
    estimates = []
    for title, one in shown:
        verdict = one.verdict
        delta, interval = verdict.delta_pct, verdict.ci95_pct
        assert delta is not None, "verdicts without one are left out"
        estimates.append(Estimate(cut(one.title, LONGEST_LABEL), delta, interval, verdict.verdict))
        ends = [f"{end:+.2f}" for end in interval] if interval else ["n/a", "n/a"]
        source = verdict.reference.source if verdict.reference else ""
        smallest = verdict.smallest_visible_change_pct
        would_show = "n/a" if smallest is None else f"{smallest:.2f}"
        table.add_row(title, f"{delta:+.2f}", *ends, would_show, verdict.verdict, source)
    drawing = estimates_chart(estimates)
    caption = "right of 0 is slower; circle: pass, triangles: regressed or improved, diamond: inconclusive, square: not"
    return Figure("Differences with 95 % intervals", f"{caption} comparable", drawing, table)


def scaling_figures(runs: Sequence[AnalyzedRun]) -> Iterator[Figure]:
    """One for each recipe that was measured at several scales; ``runs`` are one for each configuration."""
    recipes: dict[tuple[str, str, str, str, str], dict[int, AnalyzedRun]] = {}
    for run in runs:
        if run.recipe and run.record and _tokens_per_gpu(run) is not None and run.record.plan.profile is None:
            one = run.recipe
            name = (one.workload, one.size, one.dtype.value, one.gpu_type, run.record.program)
            recipes.setdefault(name, {}).setdefault(one.layout.gpus, run)
    several = [(name, scales) for name, scales in recipes.items() if len(scales) >= FEWEST]
    for place, (name, scales) in enumerate(several, start=1):
        yield _scaling_figure(place, " ".join(name[:3]) + f" on {name[3]}", dict(sorted(scales.items())))


def _scaling_figure(place: int, recipe: str, scales: Mapping[int, AnalyzedRun]) -> Figure:
    points = [(float(gpus), value) for gpus, run in scales.items() if (value := _tokens_per_gpu(run)) is not None]
    first = points[0][1]
    batches = {run.recipe.layout.gbs for run in scales.values() if run.recipe}
    kind = "the same global batch size" if len(batches) == 1 else "larger global batch sizes"
    others = {gpus: {one.name: one for one in figures_beside(run)} for gpus, run in scales.items()}
    right = ("GPUs", "tokens/s per GPU", "efficiency %", *BESIDE, "global batch size")
    table = result_table(f"Scaling of {recipe}", *right, "run", "sources", right=right)
    for (gpus, value), run in zip(points, scales.values(), strict=True):
        batch = str(run.recipe.layout.gbs) if run.recipe else "unknown"
        found = others[int(gpus)]
        beside = [known(found[kind].tokens_per_s_per_gpu) if kind in found else "" for kind in BESIDE]
        efficiency, sources = (
            percent(100 * value / first),
            "; ".join(f"{one.name}: {one.source}" for one in found.values()),
        )
        table.add_row(f"{gpus:g}", number(value), efficiency, *beside, batch, run.id, sources)
    name = f"scaling-{place}"
    line = Line("measured", BLUE, points)
    marked = [Marked("", "o", BLUE, points), *_marks(others)]
    drawing = series_chart(name, [line], ("GPUs", "tokens/s per GPU"), marked=marked, level=first, doubling=True)
    last, value = points[-1]
    efficiency = percent(100 * value / first)
    caption = f"with {kind}; dashed: as at {points[0][0]:g} GPUs; at {last:g} GPUs {efficiency} % of it"
    named = dict.fromkeys(f"{one.name}: {one.source}" for found in others.values() for one in found.values())
    return Figure(f"Scaling of {recipe}", "; ".join([caption, *named]), drawing, table)


def _marks(others: Mapping[int, Mapping[str, Beside]]) -> Iterator[Marked]:
    """By what kind of figure it is, those of each scale."""
    for kind, (color, shape, size, _) in BESIDE.items():
        found = [(float(gpus), one[kind].tokens_per_s_per_gpu) for gpus, one in others.items() if kind in one]
        if points := list(points_of(found)):
            yield Marked(kind, shape, color, points, size)


def _tokens_per_gpu(run: AnalyzedRun) -> float | None:
    return None if run.reason else run.tokens_per_s_per_gpu


CHANGING = ("software.", "hardware.device", "hardware.power", "release")
"""Conditions whose change is marked in a history; keys that begin with these."""


def history_figure(section: str, runs: Sequence[AnalyzedRun]) -> Figure | Missing:
    """Means of the runs of a recipe in order of time, with what changed between them, and the steps that are found."""
    measured = [(run, run.step_time_s) for run in runs if flaw_of(run) is None and run.step_time_s]
    if len(measured) < 2:
        return Missing(f"{len(measured)} run of this recipe is a measurement; a history needs 2")
    found = [run for run, _ in measured]
    changes = ["", *(_changed(*pair) for pair in pairwise(found))]
    levels = find_levels([times.mean for _, times in measured])
    steps = _steps(levels)
    name = f"history-{section}"
    drawing = history_chart(name, [_estimate(*one) for one in measured], changes, levels)
    headers = ("run", "started", "step time s", "95 % interval", "changed", "step")
    table = result_table("Runs of this recipe", *headers, right=("step time s",))
    for place, ((run, times), change) in enumerate(zip(measured, changes, strict=True)):
        started = local_time(run.started_s) if run.started_s else "unknown"
        table.add_row(run.id, started, number(times.mean), interval_of(times.ci95), change, steps.get(place, ""))
    captions = [f"{len(measured)} runs with the 95 % interval of their mean"]
    captions += [
        f"{step} from run {found[place].id} on, {changes[place] or 'where nothing that is recorded changed'}"
        for place, step in steps.items()
    ]
    if others := [change for place, change in enumerate(changes) if change and place not in steps]:
        captions.append(f"without a step: {', '.join(dict.fromkeys(others))}")
    return Figure("History", "; ".join(captions), drawing, table)


def _steps(levels: Sequence[Level]) -> dict[int, str]:
    """The size of each step in words, by the place of the first run after it."""
    sizes = changes_pct(levels)
    return {
        level.runs.start: f"▼ {percent(size)} % slower" if size > 0 else f"▲ {percent(-size)} % faster"
        for level, size in zip(levels[1:], sizes, strict=True)
    }


def _estimate(run: AnalyzedRun, times: Statistics) -> Estimate:
    return Estimate(short_time(run.started_s) if run.started_s else run.id, times.mean, times.ci95, None)


def _changed(before: AnalyzedRun, after: AnalyzedRun) -> str:
    """What of software and hardware differs between two runs, in a line; empty if nothing does."""
    found = (
        one
        for one in known_differences(before.conditions, after.conditions)
        if one.key.startswith(CHANGING) or rule_of(one.key).important
    )
    return ", ".join(f"{one.key.rpartition('.')[2]} {one.before} to {one.after}" for one in found)

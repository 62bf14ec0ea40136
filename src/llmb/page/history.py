# SPDX-License-Identifier: Apache-2.0
"""The runs of a recipe over time: what changed between them, and where their step time did."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of
from llmb.metrics.history import Level, changes_pct, find_levels
from llmb.metrics.statistics import Statistics
from llmb.missing import Missing
from llmb.page.charts import BLUE, INK, PAPER, PURPLE, RED, Drawing, Estimate, distances, label_some, name_axes
from llmb.page.figure import Figure
from llmb.report.jobs_report import local_time, short_time
from llmb.report.table import interval_of, number, result_table
from llmb.verdict.sentence import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

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
    return Figure(name, "History", "; ".join(captions), drawing, table)


def _steps(levels: Sequence[Level]) -> dict[int, str]:
    """The size of each step in words, by the place of the first run after it."""
    sizes = changes_pct(levels)
    return {
        level.runs.start: f"▼ {percent(size)} % slower" if size > 0 else f"▲ {percent(-size)} % faster"
        for level, size in zip(levels[1:], sizes, strict=True)
    }


def history_chart(name: str, estimates: Sequence[Estimate], changes: Sequence[str], levels: Sequence[Level]) -> Drawing:
    """Values with their intervals from left to right; ``changes`` are dotted lines, and several levels full ones."""

    def draw(canvas: "Canvas") -> None:
        plot = canvas.add_subplot()
        places, values = range(len(estimates)), [one.value for one in estimates]
        plot.errorbar(
            places, values, yerr=distances(estimates), fmt="o", color=BLUE, markersize=6, markeredgecolor=PAPER
        )
        for place, change in enumerate(changes):
            if change:
                plot.axvline(place - 0.5, color=PURPLE, linewidth=1, dashes=(2, 2))
        for before, after in pairwise(levels):
            mark = "v" if after.mean_s > before.mean_s else "^"
            middle = (before.mean_s * after.mean_s) ** 0.5
            plot.plot(after.runs.start - 0.5, middle, mark, color=RED, markersize=9, markeredgecolor=PAPER, zorder=3)
        for level in levels if len(levels) > 1 else ():
            plot.hlines(level.mean_s, level.runs.start - 0.5, level.runs.stop - 0.5, color=INK, linewidth=1)
        name_axes(plot, ("runs, the newest last", "step time, s"))
        label_some(plot, [one.label for one in estimates])

    return Drawing(name, draw)


def _estimate(run: AnalyzedRun, times: Statistics) -> Estimate:
    return Estimate(short_time(run.started_s) if run.started_s else run.id, times.mean, times.ci95, None)


def _changed(before: AnalyzedRun, after: AnalyzedRun) -> str:
    """What of software and hardware differs between two runs, in a line; empty if nothing does."""
    keys = [key for key in after.conditions if key.startswith(CHANGING)]
    found = [key for key in keys if before.conditions.get(key) != after.conditions.get(key)]
    return ", ".join(
        f"{key.rpartition('.')[2]} {before.conditions.get(key)} to {after.conditions[key]}" for key in found
    )

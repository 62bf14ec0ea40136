# SPDX-License-Identifier: Apache-2.0
"""Plots of one run and of several, with published and predicted values of their recipes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from llmb.base.missing import Missing
from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics
from llmb.readers.anomalies import changes_pct, find_anomalies, find_levels
from llmb.readers.profiles.breakdown import shares
from llmb.reports.formats import cell, interval_of, number
from llmb.reports.jobs_report import local_time, short_time
from llmb.reports.page.charts import (
    BESIDE,
    BLUE,
    GREEN,
    INK,
    MOST_POINTS,
    MUTED,
    ORANGE,
    PREDICTED,
    PUBLISHED,
    PURPLE,
    RED,
    Drawing,
    Estimate,
    Line,
    Marked,
    grid_chart,
    history_chart,
    parts_chart,
    series_chart,
)
from llmb.reports.table import Column, Table, numbers, rows_table, table_of, texts
from llmb.reports.trace_report import COLORS, shown_parts
from llmb.runs.analyzed_run import AnalyzedRun, flaw_of
from llmb.runs.conditions import definite_differences, rule_of
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.rank_times import read_excess
from llmb.runs.steps import Step, read_steps
from llmb.runs.trace_reports import read_breakdown
from llmb.verdict.judgement import percent

STEP = "step"
SIX = "{:.6g}".format
"""Format a number with six significant digits."""
BASELINE = ORANGE
"""The color of the runs of a baseline."""
Points = Sequence[tuple[float, float]]
NO_STEPS = "the steps are not recorded one by one; a log has them as text"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, a sentence about its content, and its data."""

    title: str
    caption: str
    drawing: Drawing
    table: Table

    @property
    def name(self) -> str:
        """Return a name that is unique on a page and accepted as an argument."""
        return self.drawing.name


def first_rows(title: str, rows: Sequence[Any], columns: Sequence[Column[Any]]) -> Table:
    """Return a table of at most ``MOST_POINTS`` rows, with a note if there are more."""
    caption = f"the first {MOST_POINTS:,} of {len(rows):,}; llmb export has all" if len(rows) > MOST_POINTS else ""
    return table_of(title, rows[:MOST_POINTS], columns, caption=caption)


@dataclass(frozen=True, slots=True)
class Beside:
    """Values of a recipe from one source; None for a value that the source does not report."""

    name: str
    """The source's name, which determines the mark."""
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    source: str


def figures_beside(run: AnalyzedRun) -> list[Beside]:
    """Return the published and the predicted values of the run's recipe, if known."""
    found = []
    if run.recipe and (expected := run.recipe.figure):
        tokens = None if expected.tokens_per_s is None else expected.tokens_per_s / run.recipe.layout.gpus
        source = f"{expected.source} line {expected.line}"
        found.append(Beside(PUBLISHED, expected.step_time_s, tokens, source))
    plan = run.record.plan if run.record else None
    if plan and (predicted := plan.predicted):
        layout, (low, high) = plan.recipe.layout, predicted.ci95_s
        tokens = layout.gbs * layout.seq_len / predicted.step_time_s / layout.gpus
        source = f"by llmb before the run, from {low:.4g} to {high:.4g} s"
        found.append(Beside(PREDICTED, predicted.step_time_s, tokens, source))
    return found


FARTHEST = 0.25
"""The largest relative distance from the mean at which a published or predicted step time is drawn with the steps."""
Found = tuple[list[Figure], list[tuple[str, str]]]
StepsOf = tuple[AnalyzedRun, Sequence[Step]]


def run_figures(section: str, run: AnalyzedRun, other: AnalyzedRun | None) -> Found:
    """Return the plots of one run, some of which also show the run ``other``, and the missing plots with reasons."""
    try:
        steps, other_steps = _steps(run), _steps(other) if other else []
    except (OSError, BrokenRecord) as error:
        return [], [("steps", f"they cannot be read: {error}")]
    candidates = {
        "step times": step_times_figure(section, (run, steps), (other, other_steps) if other else None),
        "loss": loss_figure(section, (run, steps), (other, other_steps) if other else None),
        "ranks": ranks_figure(section, run),
        "breakdown of a step": breakdown_figure(section, run),
    }
    figures = [one for one in candidates.values() if isinstance(one, Figure)]
    missing = [(name, one.reason) for name, one in candidates.items() if isinstance(one, Missing)]
    return figures, missing


def _steps(run: AnalyzedRun) -> Sequence[Step]:
    return [] if run.record is None else read_steps(RunFolder(run.path).steps)


def _step_times(run: AnalyzedRun, steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Return each step with its time; for a log, only the steps of the window."""
    first = run.window.first if run.window else 0
    logged = ((float(place), seconds) for place, seconds in enumerate(run.step_times_s, start=first))
    return [(float(step.step), step.step_time_s) for step in steps] or list(logged)


def _losses(steps: Sequence[Step]) -> list[tuple[float, float]]:
    return [(float(step.step), step.loss) for step in steps if step.finite and step.loss is not None]


def _name_of(run: AnalyzedRun, other: AnalyzedRun) -> str:
    return run.label if run.label and run.label != other.label else run.id


def _lines(
    name: str, color: str, own: Points, other: Points, runs: tuple[AnalyzedRun, AnalyzedRun | None]
) -> list[Line]:
    run, baseline = runs
    if baseline is None or not other:
        return [Line(name, color, own)]
    return [Line(_name_of(baseline, run), BASELINE, other), Line(_name_of(run, baseline), BLUE, own)]


def step_times_figure(section: str, of_run: StepsOf, of_other: StepsOf | None) -> Figure | Missing:
    """Plot step times, with the window, its mean, and marks on special steps; return Missing if no time is known."""
    run, steps = of_run
    times, other_times = _step_times(*of_run), _step_times(*of_other) if of_other else []
    if not times:
        return Missing(flaw_of(run) or NO_STEPS)
    window, odd = run.window, _outliers(run, steps)
    groups = {
        "checkpoint": ("s", ORANGE, {step.step for step in steps if step.saving}),
        "profiled": ("^", PURPLE, {step.step for step in steps if step.profiled}),
        "outlier": ("X", RED, odd),
        "not finite": ("D", INK, {step.step for step in steps if not step.finite}),
    }
    marked = [
        Marked(label, shape, color, [point for point in times if point[0] in which])
        for label, (shape, color, which) in groups.items()
        if which
    ]
    mean = run.step_time_s.mean if run.step_time_s else None
    others = [] if of_other or not steps else figures_beside(run)
    drawing = series_chart(
        f"step-times-{section}",
        _lines("step time", BLUE, times, other_times, (run, of_other[0] if of_other else None)),
        (STEP, "s"),
        marked=marked,
        window=(window.first - 0.5, window.last + 0.5) if steps and window and run.step_time_s else None,
        level=mean if steps else None,
        beside={one.name: one.step_time_s for one in others if one.step_time_s and _is_near(one.step_time_s, mean)},
    )
    rows = []
    for step, seconds in times:
        notes = [label for label, (_, _, which) in groups.items() if step in which]
        inside = bool(steps) and window is not None and int(step) in window
        rows.append((step, seconds, ", ".join(["window"] * inside + notes)))
    columns = [*numbers(f"{STEP}: 0", form="{:.0f}".format), *numbers("step time s: 1", form=SIX), *texts("note: 2")]
    table = first_rows(f"Steps of run {run.id}", rows, columns)
    against = [f"against run {of_other[0].id}"] if of_other and other_times else []
    caption = _step_times_caption(run, len(steps), odd, others) if steps else f"{run.id}: the steps of the window"
    return Figure("Step times", "; ".join([caption, *against]), drawing, table)


def _step_times_caption(run: AnalyzedRun, count: int, odd: set[int], others: Sequence[Beside]) -> str:
    parts = [f"run {run.id}, {counted(count, 'step')}"]
    if run.window and run.step_time_s:
        parts.append(f"shaded: the window, steps {run.window.first} to {run.window.last}; dashed: its mean")
    mean = run.step_time_s.mean if run.step_time_s else None
    for one in others:
        if one.step_time_s:
            drawn = "" if _is_near(one.step_time_s, mean) else ", not drawn"
            parts.append(f"{one.name}{drawn}: {number(one.step_time_s)} s, {one.source}")
    if odd:
        parts.append(f"{counted(len(odd), 'outlier')} beyond five times the spread")
    if count > MOST_POINTS:
        parts.append("of each group of steps the shortest and the longest")
    return "; ".join(parts)


def _is_near(other_s: float, mean_s: float | None) -> bool:
    """Return whether to plot another step time: a distant value would flatten the line of the steps."""
    return mean_s is not None and abs(other_s / mean_s - 1) <= FARTHEST


def _outliers(run: AnalyzedRun, steps: Sequence[Step]) -> set[int]:
    window = run.window
    inside = [step for step in steps if window and step.step in window and not step.profiled]
    found = find_anomalies([step.step_time_s for step in inside], 0).outliers
    return {inside[one.step].step for one in found}


def loss_figure(section: str, of_run: StepsOf, of_other: StepsOf | None) -> Figure | Missing:
    run, steps = of_run
    finite, other = _losses(steps), _losses(of_other[1]) if of_other else []
    if not finite:
        return Missing("no step has a finite loss" if steps else NO_STEPS)
    lines = _lines("loss", GREEN, finite, other, (run, of_other[0] if of_other else None))
    drawing = series_chart(f"loss-{section}", lines, (STEP, "loss"))
    columns = [*numbers(STEP, form=str), *numbers("loss", "gradient norm: grad_norm", form=SIX)]
    table = first_rows(f"Loss of run {run.id}", steps, columns)
    caption = f"from {number(steps[0].loss)} to {number(steps[-1].loss)}"
    if len(finite) < len(steps):
        caption += f"; {counted(len(steps) - len(finite), 'step')} not finite and not drawn"
    return Figure("Loss", caption, drawing, table)


def breakdown_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    """Plot the parts of a profiled step, in percent of the step; return Missing if there is no breakdown."""
    if run.record is None or run.record.plan.profile is None:
        return Missing("the run was not profiled: llmb run --profile" if run.record else "a log contains no profile")
    try:
        step = read_breakdown(RunFolder(run.path))
    except BrokenRecord as error:
        return Missing(error.what)
    if step is None:
        return Missing("the profile has no breakdown of a step")
    of_step, names = shares(step), shown_parts([step])
    colors = {"idle": MUTED, "unclassified": ORANGE}
    parts = [(name, colors.get(part, COLORS[part]), 100 * of_step[part]) for part, name in names.items()]
    drawing = parts_chart(f"breakdown-{section}", parts)
    table = table_of(f"Step {step.step}", parts, [*texts("part: 0"), *numbers("%: 2")])
    caption = f"step {step.step} of rank {step.rank}, {number(1e3 * step.duration_s)} ms"
    return Figure("Where the time of a step went", caption, drawing, table)


MOST_ROWS, MOST_COLUMNS = 64, 240
"""Maximum numbers of rows and columns in the map of ranks; rows of two pixels are still visible."""
MOST_LISTED = 100
"""Maximum number of ranks in the table, the slowest first."""
STANDS_OUT_PCT = 1.0


def ranks_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    """Plot how much longer each rank's own work takes than the median rank's; Missing without comparable times."""
    if run.record is None or run.recipe is None:
        return Missing("a log does not contain the times of single ranks")
    if run.recipe.layout.gpus < 2:
        return Missing("the run has one rank")
    found = read_excess(RunFolder(run.path).rank_times, run.recipe)
    if isinstance(found, Missing):
        return found
    lines, own = found.lines, found.alone_pct
    typical = np.median(own, axis=0)
    ranks = sorted(range(own.shape[1]), key=lambda rank: -typical[rank])
    name = f"ranks-{section}"
    rows, columns = _groups(len(ranks), MOST_ROWS), _groups(len(lines), MOST_COLUMNS)
    grid = [[float(own[column.start : column.stop, row.start : row.stop].max()) for column in columns] for row in rows]
    extent = (lines[0].first_step - 0.5, lines[-1].last_step + 0.5, len(ranks) - 0.5, -0.5)
    drawing = grid_chart(name, grid, extent, (STEP, "rank"))
    slowest = np.bincount(own.argmax(axis=-1), minlength=len(ranks)) / len(lines)
    caption = "; ".join(
        [
            "input, copies to the GPU and forward passes, beyond those of the median rank, in % of its forward passes",
            _slowest_text(ranks[0], typical[ranks[0]], slowest[ranks[0]]),
            *([f"a row: the slowest of {len(rows[0])} ranks"] if len(rows[0]) > 1 else []),
            *([f"a column: the slowest of {len(columns[0])} steps"] if len(columns[0]) > 1 else []),
        ]
    )
    listed = [(rank, *found.of_rank(rank), slowest[rank]) for rank in ranks[:MOST_LISTED]]
    return Figure("Ranks", caption, drawing, _ranks_table(run.id, listed, len(ranks)))


def _groups(count: int, most: int) -> list[range]:
    size = math.ceil(count / most)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _slowest_text(rank: int, typical_pct: float, share: float) -> str:
    if typical_pct < STANDS_OUT_PCT:
        return f"no rank stands out: rank {rank} is {number(typical_pct)} % beyond it in most steps"
    text = f"rank {rank} is {number(typical_pct)} % beyond it in a typical step"
    return f"{text}, and the slowest in {100 * share:.0f} % of the steps"


def _ranks_table(run: str, ranks: Sequence[tuple[int, float, float, float, float, float]], count: int) -> Table:
    def ms(seconds: float) -> str:
        return number(1e3 * seconds)

    columns = [
        *numbers("rank: 0", form=str),
        *numbers("input: 1", "copies: 2", "compute: 3", "other waits: 4", form=ms),
        *numbers("slowest in % of steps: 5", form=lambda share: f"{100 * share:.0f}"),
    ]
    more = f"the {MOST_LISTED} slowest of {count:,}; rank_times.jsonl has all, step by step"
    title = f"Milliseconds per step that ranks of run {run} take longer than the median rank, the slowest first"
    return table_of(title, ranks, columns, caption=more if count > MOST_LISTED else "")


FEWEST = 2
"""The minimum number of scales to plot."""


def scaling_figures(runs: Sequence[AnalyzedRun]) -> Iterator[Figure]:
    """Yield one plot per recipe measured at several scales; ``runs`` contains one run per configuration."""
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
    others = {gpus: {one.name: one for one in figures_beside(run)} for gpus, run in scales.items()}
    first, (last, value) = points[0][1], points[-1]
    batches = {run.recipe.layout.gbs for run in scales.values() if run.recipe}
    rows = []
    for (gpus, tokens), run in zip(points, scales.values(), strict=True):
        found = others[int(gpus)]
        beside = [cell(found[kind].tokens_per_s_per_gpu) if kind in found else "" for kind in BESIDE]
        figures = (number(tokens), percent(100 * tokens / first), *beside)
        batch = str(run.recipe.layout.gbs) if run.recipe else "unknown"
        rows.append((f"{gpus:g}", *figures, batch, run.id, "; ".join(map(_source, found.values()))))
    right = ("GPUs", "tokens/s per GPU", "efficiency %", *BESIDE, "global batch size")
    table = rows_table(f"Scaling of {recipe}", (*right, "run", "sources"), rows, right=right)
    marked = [Marked("", "o", BLUE, points), *_marks(others)]
    axes, lines = ("GPUs", "tokens/s per GPU"), [Line("measured", BLUE, points)]
    drawing = series_chart(f"scaling-{place}", lines, axes, marked=marked, level=first, doubling=True)
    few, many = (counted(round(count), "GPU") for count in (points[0][0], last))
    kind = "the same global batch size" if len(batches) == 1 else "larger global batch sizes"
    caption = f"with {kind}; dashed: as at {few}; at {many} {percent(100 * value / first)} % of it"
    named = dict.fromkeys(_source(one) for found in others.values() for one in found.values())
    return Figure(f"Scaling of {recipe}", "; ".join([caption, *named]), drawing, table)


def _source(one: Beside) -> str:
    return f"{one.name}: {one.source}"


def _marks(others: Mapping[int, Mapping[str, Beside]]) -> Iterator[Marked]:
    for kind, (color, shape, size, _) in BESIDE.items():
        found = [(float(gpus), one[kind].tokens_per_s_per_gpu) for gpus, one in others.items() if kind in one]
        if points := [(gpus, value) for gpus, value in found if value is not None]:
            yield Marked(kind, shape, color, points, size)


def _tokens_per_gpu(run: AnalyzedRun) -> float | None:
    return None if run.reason else run.tokens_per_s_per_gpu


CHANGING = ("software.", "hardware.device", "hardware.power", "release")
"""Prefixes of conditions whose changes are marked in a history, in addition to changes of important conditions."""


def history_figure(section: str, runs: Sequence[AnalyzedRun], baseline: Sequence[AnalyzedRun]) -> Figure | Missing:
    """Plot the mean step times of a recipe's runs in chronological order, with changes in software and hardware, and
    shifts in level.

    With a baseline, its runs have another color, and no changes or shifts are marked: the comparison reports them.
    """
    others = {run.counted_as for run in baseline}
    known_times = [(run, run.step_time_s) for run in (*baseline, *runs) if flaw_of(run) is None and run.step_time_s]
    measured = sorted(known_times, key=lambda one: one[0].started_s or 0.0) if baseline else known_times
    if len(measured) < 2:
        return Missing(f"a history needs 2 measurements of this recipe, but there is {len(measured) or 'none'}")
    found = [run for run, _ in measured]
    sides = [run.counted_as in others for run in found]
    changes = ["", *(_changed(*pair) for pair in pairwise(found))] if not baseline else [""] * len(found)
    levels = [] if baseline else find_levels([times.mean for _, times in measured])
    steps = {
        level.runs.start: f"▼ {percent(size)} % slower" if size > 0 else f"▲ {percent(-size)} % faster"
        for level, size in zip(levels[1:], changes_pct(levels), strict=True)
    }
    colors = [BASELINE if side else BLUE for side in sides]
    drawing = history_chart(f"history-{section}", _estimates(measured), colors, changes, levels)
    rows = []
    for place, (run, times) in enumerate(measured):
        started = local_time(run.started_s) if run.started_s else "unknown"
        note = changes[place] if not baseline else "baseline" if sides[place] else "judged"
        rows.append((run.id, started, number(times.mean), interval_of(times.ci95), note, steps.get(place, "")))
    headers = ("run", "started", "step time s", "95 % interval", "side" if baseline else "changed", "step")
    table = rows_table("Runs of this recipe", headers, rows, right=("step time s",))
    captions = [f"{len(measured)} runs with the 95 % interval of their mean"]
    if baseline:
        captions.append(f"{sides.count(True)} of the baseline are orange, {sides.count(False)} that are judged blue")
    captions += [
        f"{step} from run {found[place].id} on, {changes[place] or 'where nothing that is recorded changed'}"
        for place, step in steps.items()
    ]
    if unnoticed := [change for place, change in enumerate(changes) if change and place not in steps]:
        captions.append(f"without a step: {', '.join(dict.fromkeys(unnoticed))}")
    return Figure("History", "; ".join(captions), drawing, table)


def _estimates(measured: Sequence[tuple[AnalyzedRun, Statistics]]) -> list[Estimate]:
    """Intervals that include 0 are omitted, because they are too wide to show anything."""
    times = [short_time(run.started_s) if run.started_s else run.id for run, _ in measured]
    labels = times if len({*times}) == len(times) else [run.id for run, _ in measured]
    return [
        Estimate(label, one.mean, one.ci95 if one.ci95 and one.ci95[0] > 0 else None)
        for label, (_, one) in zip(labels, measured, strict=True)
    ]


def _changed(before: AnalyzedRun, after: AnalyzedRun) -> str:
    found = (
        one
        for one in definite_differences(before.conditions, after.conditions)
        if one.key.startswith(CHANGING) or rule_of(one.key).important
    )
    return ", ".join(f"{one.key.rpartition('.')[2]} {one.before} to {one.after}" for one in found)

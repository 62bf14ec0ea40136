# SPDX-License-Identifier: Apache-2.0
"""The figures of one run, and what is drawn beside them: what is published of its recipe, and predicted."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of
from llmb.metrics.anomalies import find_anomalies
from llmb.missing import Missing
from llmb.page.charts import (
    MOST_POINTS,
    PREDICTED,
    PUBLISHED,
    Line,
    Marked,
    grid_chart,
    parts_chart,
    series_chart,
)
from llmb.page.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, RED, Drawing
from llmb.report.table import Table, number, result_table
from llmb.report.trace_report import COLORS, shown_parts
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.steps import RankTimes, Step, read_rank_times, read_steps
from llmb.runs.trace_reports import kept_breakdown
from llmb.shown_text import counted
from llmb.traces.breakdown import shares

STEP = "step"
NO_STEPS = "the steps are not recorded one by one; a log has them as text"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, what it shows in a sentence, and its data."""

    title: str
    caption: str
    drawing: Drawing
    table: Table

    @property
    def name(self) -> str:
        """Unique on a page; users may ask for it."""
        return self.drawing.name


def add_first(table: Table, rows: Sequence[tuple[str, ...]]) -> None:
    """Adds the first of more rows than a page can bear, which the table then says."""
    table.rows.extend(rows[:MOST_POINTS])
    if len(rows) > MOST_POINTS:
        table.caption = f"the first {MOST_POINTS:,} of {len(rows):,}; llmb export has all"


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of one source; None for what it does not state."""

    name: str
    """Decides the mark."""
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    source: str


def figures_beside(run: AnalyzedRun) -> list[Beside]:
    return [*_published(run), *_predicted(run)]


def _published(run: AnalyzedRun) -> Iterator[Beside]:
    for expected in run.recipe.expectations[:1] if run.recipe else ():
        tokens, gpus = expected.tokens_per_s, run.recipe.layout.gpus if run.recipe else 1
        source = f"{expected.source} line {expected.line}"
        yield Beside(PUBLISHED, expected.step_time_s, None if tokens is None else tokens / gpus, source)


def _predicted(run: AnalyzedRun) -> Iterator[Beside]:
    plan = run.record.plan if run.record else None
    if plan and (found := plan.predicted):
        layout, (low, high) = plan.recipe.layout, found.ci95_s
        tokens = layout.gbs * layout.seq_len / found.step_time_s / layout.gpus
        source = f"by llmb before the run, from {low:.4g} to {high:.4g} s"
        yield Beside(PREDICTED, found.step_time_s, tokens, source)


FARTHEST = 0.25
"""How far from the mean another step time may be, as a share of it, to be drawn beside the steps."""
Found = tuple[list[Figure], list[tuple[str, str]]]


def run_figures(section: str, run: AnalyzedRun) -> Found:
    """The figures of one run, and what is missing, with the reason."""
    try:
        steps = [] if run.record is None else read_steps(RunFolder(run.path).steps)
    except (OSError, BrokenRecord) as error:
        return [], [("steps", f"they cannot be read: {error}")]
    candidates = {
        "step times": step_times_figure(section, run, steps),
        "loss": loss_figure(section, run, steps),
        "ranks": ranks_figure(section, run),
        "breakdown of a step": breakdown_figure(section, run),
    }
    figures = [one for one in candidates.values() if isinstance(one, Figure)]
    missing = [(name, one.reason) for name, one in candidates.items() if isinstance(one, Missing)]
    return figures, missing


def step_times_figure(section: str, run: AnalyzedRun, steps: Sequence[Step]) -> Figure | Missing:
    """Each step, with the window, its mean, and the steps that something was done to."""
    if not steps:
        return _logged_step_times(section, run)
    window, times = run.window, [(float(step.step), step.step_time_s) for step in steps]
    odd = _outliers(run, steps)
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
    shaded = (window.first - 0.5, window.last + 0.5) if window and run.step_time_s else None
    mean = run.step_time_s.mean if run.step_time_s else None
    others = figures_beside(run)
    drawing = series_chart(
        f"step-times-{section}",
        [Line("step time", BLUE, times)],
        (STEP, "s"),
        marked=marked,
        window=shaded,
        level=mean,
        beside={one.name: one.step_time_s for one in others if one.step_time_s and _is_near(one.step_time_s, mean)},
    )
    table = result_table(f"Steps of run {run.id}", STEP, "step time s", "note", right=(STEP, "step time s"))
    rows = []
    for step in steps:
        notes = [label for label, (_, _, which) in groups.items() if step.step in which]
        inside = window is not None and step.step in window
        rows.append((str(step.step), f"{step.step_time_s:.6g}", ", ".join(["window"] * inside + notes)))
    add_first(table, rows)
    caption = _step_times_caption(run, len(steps), odd, others)
    return Figure("Step times", caption, drawing, table)


def _step_times_caption(run: AnalyzedRun, count: int, odd: set[int], others: Sequence[Beside]) -> str:
    parts = [f"run {run.id}, {count} steps"]
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
    """One that is far from what was measured would leave the steps a flat line."""
    return mean_s is not None and abs(other_s / mean_s - 1) <= FARTHEST


def _logged_step_times(section: str, run: AnalyzedRun) -> Figure | Missing:
    if not run.step_times_s:
        return Missing(flaw_of(run) or NO_STEPS)
    first = run.window.first if run.window else 0
    times = [(float(first + place), seconds) for place, seconds in enumerate(run.step_times_s)]
    drawing = series_chart(f"step-times-{section}", [Line("step time", BLUE, times)], (STEP, "s"))
    table = result_table(f"Steps of {run.id}", STEP, "step time s", right=(STEP, "step time s"))
    add_first(table, [(f"{step:.0f}", f"{seconds:.6g}") for step, seconds in times])
    return Figure("Step times", f"{run.id}: the steps of the window", drawing, table)


def _outliers(run: AnalyzedRun, steps: Sequence[Step]) -> set[int]:
    """Steps of the window that the ranking of causes takes for outliers too."""
    window = run.window
    inside = [step for step in steps if window and step.step in window and not step.profiled]
    found = find_anomalies([step.step_time_s for step in inside], 0).outliers
    return {inside[one.step].step for one in found}


def loss_figure(section: str, run: AnalyzedRun, steps: Sequence[Step]) -> Figure | Missing:
    if not steps:
        return Missing(NO_STEPS)
    finite = [(float(step.step), step.loss) for step in steps if step.finite and step.loss is not None]
    if not finite:
        return Missing("no step has a loss that is known and finite")
    drawing = series_chart(f"loss-{section}", [Line("loss", GREEN, finite)], (STEP, "loss"))
    table = result_table(f"Loss of run {run.id}", STEP, "loss", "gradient norm", right=(STEP, "loss", "gradient norm"))
    add_first(table, [(str(step.step), f"{step.loss:.6g}", f"{step.grad_norm:.6g}") for step in steps])
    caption = f"from {number(steps[0].loss)} to {number(steps[-1].loss)}"
    if len(finite) < len(steps):
        caption += f"; {len(steps) - len(finite)} steps are not finite and not drawn"
    return Figure("Loss", caption, drawing, table)


def breakdown_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    """Parts of a profiled step, in percent of it."""
    if run.record is None or run.record.plan.profile is None:
        return Missing("the run was not profiled: llmb run --profile")
    try:
        step = kept_breakdown(RunFolder(run.path))
    except BrokenRecord as error:
        return Missing(error.what)
    if step is None:
        return Missing("the profile has no breakdown of a step")
    of_step, names = shares(step), shown_parts([step])
    colors = {"idle": MUTED, "unclassified": ORANGE}
    parts = [(name, colors.get(part, COLORS[part]), 100 * of_step[part]) for part, name in names.items()]
    drawing = parts_chart(f"breakdown-{section}", parts)
    table = result_table(f"Step {step.step}", "part", "%", right=("%",))
    for name, _, share in parts:
        table.add_row(name, number(share))
    caption = f"step {step.step} of rank {step.rank}, {number(1e3 * step.duration_s)} ms"
    return Figure("Where the time of a step went", caption, drawing, table)


MOST_ROWS, MOST_COLUMNS = 64, 240
"""The size of the map: rows of two pixels are still seen."""
MOST_LISTED = 100
"""Ranks in the table, the slowest first."""
STANDS_OUT_PCT = 1.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """Percent are beyond the median rank of a step."""

    number: int
    layer_us: float
    typical_pct: float
    longest_pct: float
    longest_step: int
    slowest_share: float
    """In how many of the steps it was the slowest."""


def ranks_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    if run.record is None or run.recipe is None:
        return Missing(NO_STEPS)
    if run.recipe.layout.gpus < 2:
        return Missing("the run has one rank")
    try:
        lines = read_rank_times(RunFolder(run.path).rank_times)
    except (OSError, BrokenRecord) as error:
        return Missing(f"their times cannot be read: {error}")
    if not lines:
        return Missing("the times of single ranks were not recorded")
    if {len(line.layer_us) for line in lines} != {run.recipe.layout.gpus}:
        return Missing(f"their times are not those of the run's {run.recipe.layout.gpus} ranks")
    beyond = [_beyond_pct(line.layer_us) for line in lines]
    ranks = sorted(_ranks(lines, beyond), key=lambda rank: -rank.typical_pct)
    name = f"ranks-{section}"
    rows, columns = _groups(len(ranks), MOST_ROWS), _groups(len(lines), MOST_COLUMNS)
    grid = [[max(beyond[step][rank] for step in column for rank in row) for column in columns] for row in rows]
    extent = (lines[0].first_step - 0.5, lines[-1].last_step + 0.5, len(ranks) - 0.5, -0.5)
    drawing = grid_chart(name, grid, extent, (STEP, "rank"))
    caption = "; ".join(
        [
            "forward pass of a layer, beyond the median rank of the step",
            _slowest_text(ranks[0]),
            *([f"a row: the slowest of {len(rows[0])} ranks"] if len(rows[0]) > 1 else []),
            *([f"a column: the slowest of {len(columns[0])} steps"] if len(columns[0]) > 1 else []),
        ]
    )
    return Figure("Ranks", caption, drawing, _ranks_table(run.id, ranks))


def _beyond_pct(layer_us: Sequence[float]) -> list[float]:
    middle = median_low(layer_us)
    return [100 * (value / middle - 1) if middle > 0 else 0.0 for value in layer_us]


def _ranks(lines: Sequence[RankTimes], beyond: Sequence[Sequence[float]]) -> list[_Rank]:
    slowest = [max(range(len(values)), key=values.__getitem__) for values in beyond]
    found = []
    for rank in range(len(beyond[0])):
        values = [step[rank] for step in beyond]
        place = max(range(len(values)), key=values.__getitem__)
        found.append(
            _Rank(
                number=rank,
                layer_us=median(line.layer_us[rank] for line in lines),
                typical_pct=median(values),
                longest_pct=values[place],
                longest_step=lines[place].first_step,
                slowest_share=slowest.count(rank) / len(slowest),
            )
        )
    return found


def _groups(count: int, most: int) -> list[range]:
    """As few consecutive places in each as leave at most ``most`` groups."""
    size = math.ceil(count / most)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _slowest_text(rank: _Rank) -> str:
    share = f"and the slowest in {100 * rank.slowest_share:.0f} % of the steps"
    if rank.typical_pct < STANDS_OUT_PCT:
        return f"no rank stands out: rank {rank.number} is {number(rank.typical_pct)} % beyond it in most steps"
    return f"rank {rank.number} is {number(rank.typical_pct)} % beyond it in a typical step, {share}"


def _ranks_table(run: str, ranks: Sequence[_Rank]) -> Table:
    headers = ("rank", "median ms", "beyond the others %", "at most %", "in step", "slowest in % of steps")
    table = result_table(f"Forward pass of a layer by rank, run {run}, the slowest first", *headers, right=headers)
    for rank in ranks[:MOST_LISTED]:
        table.add_row(
            str(rank.number),
            number(rank.layer_us / 1000),
            f"{rank.typical_pct:+.2f}",
            f"{rank.longest_pct:+.2f}",
            str(rank.longest_step),
            f"{100 * rank.slowest_share:.0f}",
        )
    if len(ranks) > MOST_LISTED:
        table.caption = f"the {MOST_LISTED} slowest of {len(ranks):,}; rank_times.jsonl has all, step by step"
    return table

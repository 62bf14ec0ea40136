# SPDX-License-Identifier: Apache-2.0
"""The figures of one run."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of
from llmb.metrics.anomalies import find_anomalies
from llmb.missing import Missing
from llmb.page.beside import Beside, figures_beside
from llmb.page.charts import (
    BLUE,
    GREEN,
    INK,
    MOST_POINTS,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    Line,
    Marked,
    histogram_chart,
    parts_chart,
    points_of,
    series_chart,
)
from llmb.page.figure import NO_STEPS, STEP, Figure, add_first
from llmb.page.ranks import ranks_figure
from llmb.report.table import interval_of, number, result_table
from llmb.report.trace_report import COLORS, shown_parts
from llmb.resources.read import read_samples
from llmb.resources.sample import Sample
from llmb.runs.folder import RunFolder
from llmb.runs.profile_report import kept_breakdown
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import GIB
from llmb.runs.steps import Step, read_steps
from llmb.traces.summary import shares

FEWEST = 3
"""Values whose distribution is drawn."""
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
        "distribution": distribution_figure(section, run),
        "loss": loss_figure(section, run, steps),
        "memory": memory_figure(section, run, steps),
        "ranks": ranks_figure(section, run),
        "breakdown of a step": breakdown_figure(section, run),
    }
    figures = [one for one in candidates.values() if isinstance(one, Figure)]
    missing = [(name, one.reason) for name, one in candidates.items() if isinstance(one, Missing)]
    sampled, not_sampled = resource_figures(section, run, steps)
    return [*figures, *sampled], [*missing, *not_sampled]


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
        inside = window is not None and window.first <= step.step <= window.last
        rows.append((str(step.step), f"{step.step_time_s:.6g}", ", ".join(["window"] * inside + notes)))
    add_first(table, rows)
    caption = _step_times_caption(run, len(steps), odd, others)
    return Figure(f"step-times-{section}", "Step times", caption, drawing, table)


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
        parts.append(f"{len(odd)} outlier{'s' if len(odd) > 1 else ''} beyond five times the spread")
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
    return Figure(f"step-times-{section}", "Step times", f"{run.id}: the steps of the window", drawing, table)


def _outliers(run: AnalyzedRun, steps: Sequence[Step]) -> set[int]:
    """Steps of the window that the ranking of causes takes for outliers too."""
    window = run.window
    inside = [step for step in steps if window and window.first <= step.step <= window.last and not step.profiled]
    found = find_anomalies([step.step_time_s for step in inside], 0).outliers
    return {inside[one.step].step for one in found}


def distribution_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    times, values = run.step_time_s, run.step_times_s
    if times is None:
        return Missing(flaw_of(run) or "the run has no step time")
    if len(values) < FEWEST:
        return Missing(f"the window has {len(values)} steps; a distribution needs {FEWEST}")
    drawing = histogram_chart(
        f"distribution-{section}", values, ("step time, s", "steps"), mean=times.mean, interval=times.ci95
    )
    table = result_table("Statistics of the window", "statistic", "step time s", right=("step time s",))
    for name in ("mean", "median", "std"):
        table.add_row(name, number(getattr(times, name)))
    table.add_row("95 % interval of the mean", interval_of(times.ci95))
    caption = f"mean {number(times.mean)} s, 95 % interval {interval_of(times.ci95)} s, median {number(times.median)} s"
    return Figure(f"distribution-{section}", "Distribution of the window's steps", caption, drawing, table)


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
    return Figure(f"loss-{section}", "Loss", caption, drawing, table)


def memory_figure(section: str, run: AnalyzedRun, steps: Sequence[Step]) -> Figure | Missing:
    """Peak memory of the fullest rank; where it does not change, a sentence of the result says it."""
    peaks = [(float(step.step), step.peak_memory_bytes / GIB) for step in steps]
    if not peaks:
        return Missing(NO_STEPS)
    if max(y for _, y in peaks) - min(y for _, y in peaks) < 0.005 * max(y for _, y in peaks):
        return Missing(f"the peak is the same in all steps, {number(peaks[-1][1])} GiB")
    drawing = series_chart(f"memory-{section}", [Line("peak", PURPLE, peaks)], (STEP, "GiB"))
    table = result_table(f"Memory of run {run.id}", STEP, "peak GiB", "rank", right=(STEP, "peak GiB", "rank"))
    add_first(
        table, [(str(step.step), number(step.peak_memory_bytes / GIB), str(step.peak_memory_rank)) for step in steps]
    )
    return Figure(f"memory-{section}", "Peak memory", "of the rank with the most", drawing, table)


RESOURCES: Mapping[str, tuple[str, str, str]] = {
    "power_w": ("Power", "W a GPU", ORANGE),
    "sm_clock_mhz": ("SM clock", "MHz", BLUE),
    "temperature_c": ("Temperature", "C", RED),
}
"""Title, unit and color of what is sampled of GPUs."""


def resource_figures(section: str, run: AnalyzedRun, steps: Sequence[Step]) -> Found:
    """Power, clocks and temperature over the time of the steps, on the axis of the step times."""
    rows = _sampled_gpus(run, steps)
    if isinstance(rows, Missing):
        return [], [("power, clocks and temperature", rows.reason)]
    found = {name: list(points_of((at, values[name]) for at, values in rows)) for name in RESOURCES}
    figures = [_resource_figure(section, name, points, steps) for name, points in found.items() if points]
    unknown = [RESOURCES[name][0] for name, points in found.items() if not points]
    return figures, [(name, "the driver does not report it") for name in unknown]


def _resource_figure(section: str, name: str, points: Sequence[tuple[float, float]], steps: Sequence[Step]) -> Figure:
    title, unit, color = RESOURCES[name]
    headers = ("step", f"{title.lower()}, {unit}")
    drawing = series_chart(f"{name}-{section}", [Line(title, color, points)], (STEP, unit))
    table = result_table(f"{title}, mean of the GPUs of a node", *headers, right=headers)
    add_first(table, [(f"{at:.2f}", number(value)) for at, value in points])
    caption = f"mean of the GPUs of a node, beside steps {steps[0].step} to {steps[-1].step}"
    return Figure(f"{name}-{section}", title, caption, drawing, table)


GpuRows = list[tuple[float, dict[str, float | None]]]


def _sampled_gpus(run: AnalyzedRun, steps: Sequence[Step]) -> GpuRows | Missing:
    """Means of the GPUs of the first node that was sampled, by the step that was under way, as a fraction."""
    if run.record is None:
        return Missing("a log has no samples of power, clocks and temperature")
    try:
        sampled = read_samples(RunFolder(run.path).resources)
    except OSError as error:
        return Missing(f"the samples cannot be read: {error.strerror}")
    samples = next((one.samples for one in sampled if one.samples), ())
    if not samples or not steps:
        return Missing("the run was not sampled" if steps else NO_STEPS)
    if not any(sample.gpus for sample in samples):
        return Missing("no GPU was sampled; the result has the use of the cores")
    ends = [step.ended_s for step in steps]
    begin = ends[0] - steps[0].step_time_s
    inside = (sample for sample in samples if sample.gpus and begin <= sample.time_s <= ends[-1])
    return [_gpu_row(sample, steps, bisect_left(ends, sample.time_s)) for sample in inside]


def _gpu_row(sample: Sample, steps: Sequence[Step], place: int) -> tuple[float, dict[str, float | None]]:
    values = {name: [one for one in getattr(sample.gpus, name) if one is not None] for name in RESOURCES}
    step = steps[place]
    share = min(1.0, max(0.0, 1 - (step.ended_s - sample.time_s) / step.step_time_s)) if step.step_time_s else 0.0
    return step.step + share, {name: sum(some) / len(some) if some else None for name, some in values.items()}


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
    drawing = parts_chart(f"breakdown-{section}", parts, "% of the step")
    table = result_table(f"Step {step.step}", "part", "%", right=("%",))
    for name, _, share in parts:
        table.add_row(name, number(share))
    caption = f"step {step.step} of rank {step.rank}, {number(1e3 * step.duration_s)} ms"
    return Figure(f"breakdown-{section}", "Where the time of a step went", caption, drawing, table)

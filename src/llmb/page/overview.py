# SPDX-License-Identifier: Apache-2.0
"""Figures of several recipes: how each differs from its reference, and how throughput scales with GPUs."""

from collections.abc import Iterator, Mapping, Sequence

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.judge_run import Judged
from llmb.page.beside import Beside, figures_beside
from llmb.page.charts import BESIDE, BLUE, Estimate, Line, Marked, estimates_chart, points_of, series_chart
from llmb.page.figure import Figure
from llmb.report.table import known, number, result_table
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
        label = one.title if len(one.title) <= LONGEST_LABEL else f"{one.title[: LONGEST_LABEL - 3]}..."
        estimates.append(Estimate(label, delta, interval, verdict.verdict))
        ends = [f"{end:+.2f}" for end in interval] if interval else ["n/a", "n/a"]
        source = verdict.reference.source if verdict.reference else ""
        would_show = "n/a" if verdict.smallest_change_pct is None else f"{verdict.smallest_change_pct:.2f}"
        table.add_row(title, f"{delta:+.2f}", *ends, would_show, verdict.verdict, source)
    drawing = estimates_chart("differences", estimates, "% longer steps than the reference")
    caption = "right of 0 is slower; circle: pass, triangles: regressed or improved, diamond: inconclusive, square: not"
    return Figure("differences", "Differences with 95 % intervals", f"{caption} comparable", drawing, table)


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
    return Figure(name, f"Scaling of {recipe}", "; ".join([caption, *named]), drawing, table)


def _marks(others: Mapping[int, Mapping[str, Beside]]) -> Iterator[Marked]:
    """By what kind of figure it is, those of each scale."""
    for kind, (color, shape, size, _) in BESIDE.items():
        found = [(float(gpus), one[kind].tokens_per_s_per_gpu) for gpus, one in others.items() if kind in one]
        if points := list(points_of(found)):
            yield Marked(kind, shape, color, points, size)


def _tokens_per_gpu(run: AnalyzedRun) -> float | None:
    return run.record.result.tokens_per_s_per_gpu if run.record and run.record.result and not run.reason else None

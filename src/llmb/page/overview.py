# SPDX-License-Identifier: Apache-2.0
"""Figures of several recipes: how each differs from its reference, and how throughput scales with GPUs."""

from collections.abc import Iterator, Mapping, Sequence

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.judge_run import Judged
from llmb.page.charts import BLUE, ORANGE, PUBLISHED, Estimate, Line, Marked, estimates_chart, series_chart
from llmb.page.figure import Figure, published_source
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
    right = ("difference %", "from %", "to %")
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
        table.add_row(title, f"{delta:+.2f}", *ends, verdict.verdict, source)
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
    published = {gpus: found for gpus, run in scales.items() if (found := _published_per_gpu(run))}
    right = ("GPUs", "tokens/s per GPU", "efficiency %", "published tokens/s per GPU", "global batch size")
    table = result_table(f"Scaling of {recipe}", *right, "run", "published in", right=right)
    for (gpus, value), run in zip(points, scales.values(), strict=True):
        batch = str(run.recipe.layout.gbs) if run.recipe else "unknown"
        figure, source = published.get(int(gpus), (None, ""))
        efficiency = percent(100 * value / first)
        table.add_row(f"{gpus:g}", number(value), efficiency, known(figure), batch, run.id, source)
    name = f"scaling-{place}"
    line = Line("measured", BLUE, points)
    theirs = [Marked(PUBLISHED, "D", ORANGE, [(gpus, figure) for gpus, (figure, _) in published.items()])]
    marked = [Marked("", "o", BLUE, points), *(theirs if published else [])]
    drawing = series_chart(name, [line], ("GPUs", "tokens/s per GPU"), marked=marked, level=first, doubling=True)
    last, value = points[-1]
    efficiency = percent(100 * value / first)
    caption = f"with {kind}; dashed: as at {points[0][0]:g} GPUs; at {last:g} GPUs {efficiency} % of it"
    if published:
        caption += f"; diamonds: published in {', '.join(dict.fromkeys(source for _, source in published.values()))}"
    return Figure(name, f"Scaling of {recipe}", caption, drawing, table)


def _published_per_gpu(run: AnalyzedRun) -> tuple[float, str] | None:
    """The figure of a run's own scale, and its source."""
    expected = next(iter(run.recipe.expectations), None) if run.recipe else None
    if expected is None or run.recipe is None or expected.tokens_per_s is None:
        return None
    return expected.tokens_per_s / run.recipe.layout.gpus, published_source(expected)


def _tokens_per_gpu(run: AnalyzedRun) -> float | None:
    return run.record.result.tokens_per_s_per_gpu if run.record and run.record.result and not run.reason else None

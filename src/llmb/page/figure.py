# SPDX-License-Identifier: Apache-2.0
"""A figure of a page, and what is drawn beside the figures of a run: what is published of its recipe, and predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.page.charts import MOST_POINTS, PREDICTED, PUBLISHED
from llmb.page.drawing import Drawing
from llmb.report.table import Table

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

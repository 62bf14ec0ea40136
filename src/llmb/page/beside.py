# SPDX-License-Identifier: Apache-2.0
"""What is drawn beside the figures of a run: what a document publishes for its recipe, and what its plan predicts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.catalogue.load import Catalogue
from llmb.errors import UsageError
from llmb.page.charts import PREDICTED, PUBLISHED
from llmb.predict.prediction import default_calibration, predict
from llmb.predict.step import why_not_predicted
from llmb.runs.plan import EnginePlan


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
    if not isinstance(plan, EnginePlan) or plan.device != "cuda" or plan.recipe.pretended_rank is not None:
        return
    catalogue, layout = _catalogue(), plan.recipe.layout
    gpu = catalogue.gpus.get(plan.recipe.gpu_type)
    if gpu is None or why_not_predicted(plan, gpu):
        return
    try:
        found = predict(plan, gpu, default_calibration(catalogue.rates), catalogue.rates.errors)
    except UsageError:  # of a layout that is not predicted
        return
    tokens = layout.gbs * layout.seq_len / found.seconds / layout.gpus
    yield Beside(PREDICTED, found.seconds, tokens, f"as 'llmb predict' has it, within {found.error_pct:.0f} %")


@cache
def _catalogue() -> Catalogue:
    """Loaded once for all runs of a page."""
    return Catalogue()

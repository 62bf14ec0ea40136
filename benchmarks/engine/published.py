# SPDX-License-Identifier: Apache-2.0
"""The published figure to compare a proxy with: that of the full model at its smallest published scale."""

from llmb.catalogue.catalogue import Catalogue, PublishedFigure
from llmb.catalogue.published import PublishedFlops
from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.throughput import throughput

PREFERRED_GPU = "h100"
"""An H200 has the peak FLOP rate of an H100, for which most figures are published."""


class Target(Record):
    """A published MFU; ``mfu_pct`` as printed, in the convention of its document, the others recomputed.

    ``flops`` is how the document counts FLOPs, so that a proxy's FLOPs can be counted in the same way.
    """

    mfu_pct: float
    mfu_pct_full: float | None
    mfu_pct_causal: float | None
    step_time_s: float | None
    gpu_type: str
    scale: int
    layers: int
    source: str
    line: int
    release: str
    flops: PublishedFlops | None


def find_target(catalogue: Catalogue, workload: str, size: str, dtype: Dtype) -> Target | None:
    """None if no MFU is published. Full models are preferred to published proxies, tables to examples."""
    figures = [
        figure
        for figure in catalogue.figures
        if (figure.workload, figure.size, figure.dtype) == (workload, size, dtype)
        and figure.gpu_type is not None
        and figure.expectation.mfu_pct is not None
    ]
    if not figures:
        return None
    newest = max(figure.expectation.release for figure in figures)
    candidates = [
        (figure, published_recipe(catalogue, figure)) for figure in figures if figure.expectation.release == newest
    ]
    return _target(*min(candidates, key=_rank))


def published_recipe(catalogue: Catalogue, figure: PublishedFigure) -> Recipe:
    expectation = figure.expectation
    request = Request(
        workload=figure.workload,
        size=figure.size,
        dtype=figure.dtype,
        gpu_type=figure.gpu_type,
        scale=figure.gpus,
        release=expectation.release,
    )
    return resolve(catalogue, request)


def _rank(candidate: tuple[PublishedFigure, Recipe]) -> tuple[bool, bool, bool, int]:
    figure, recipe = candidate
    return figure.gpu_type != PREFERRED_GPU, figure.expectation.kind != "table", recipe.proxy, figure.gpus


def _target(figure: PublishedFigure, recipe: Recipe) -> Target:
    expectation = figure.expectation
    assert expectation.mfu_pct is not None and figure.gpu_type is not None
    counted = throughput(recipe, expectation.step_time_s).mfu_pct if expectation.step_time_s else {}
    return Target(
        mfu_pct=expectation.mfu_pct,
        mfu_pct_full=counted.get("full"),
        mfu_pct_causal=counted.get("causal"),
        step_time_s=expectation.step_time_s,
        gpu_type=figure.gpu_type,
        scale=figure.gpus,
        layers=recipe.layout.layers,
        source=expectation.source,
        line=expectation.line,
        release=expectation.release,
        flops=recipe.published_flops,
    )


def as_published(recipe: Recipe, target: Target | None) -> Recipe:
    """``recipe`` with its FLOPs counted by the formula of the target's document, errors included."""
    if target is None or target.flops is None:
        return recipe
    # A proxy's vocabulary is its own.
    slips = {name: size for name, size in target.flops.as_published.items() if name != "vocab_size"}
    flops = target.flops.model_copy(update={"printed_flops": None, "as_published": slips})
    return recipe.model_copy(update={"published_flops": flops})

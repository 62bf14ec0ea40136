# SPDX-License-Identifier: Apache-2.0
"""Judges runs by the published figures of their recipes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmb.base.missing import Missing
from llmb.catalogue.bridge_figures import PublishedFigure
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Expectation, PublishedCondition
from llmb.catalogue.records import Recipe, Window
from llmb.catalogue.window import DOCUMENTED_STEPS, resolve_window
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.checkpoints.origin import dataset_title
from llmb.runs.conditions import (
    Value,
    Values,
    condition_values,
    conditions_of,
    faults_of,
    find_conditions,
    identity_of,
    steps_text,
)
from llmb.runs.plan import EnginePlan
from llmb.runs.record import ENGINE, RunRecord, VboostOutcome
from llmb.runs.result import Condition, Reference, Result, Verdict
from llmb.verdict.group_difference import NORMAL_QUANTILE
from llmb.verdict.judgement import Tolerance, default_tolerance, judge_against_figure

DEVICE = "hardware.device"


def with_verdict(result: Result, record: RunRecord) -> Result:
    """Return a run's result with its verdict by the published figure, or the reason why there is none."""
    run = AnalyzedRun(
        id=record.id,
        path=Path(),
        identity=identity_of(record),
        conditions=conditions_of(record),
        status=result.status,
        reason=result.flaw,
        window=result.window or record.plan.window,
        step_time_s=result.step_time_s or None,
        faults=faults_of(record, result),
        record=record,
    )
    return result.model_copy(update={"verdict": published_verdict([run], record)})


def published_verdict(
    repeats: Sequence[AnalyzedRun], record: RunRecord, tolerance: Tolerance | None = None
) -> Verdict | Missing:
    """Judge repeats by the published figure of the recipe in ``record``, that of the last repeat, if any."""
    plan, window = record.plan, repeats[-1].window or record.plan.window
    steps = documented_steps(plan.recipe, window) if plan.documented_software else steps_text(window)
    own = condition_values({**_documented(repeats[-1], record), "window": steps})
    return verdict_of_recipe(plan.recipe, repeats, own, tolerance)


def verdict_of_recipe(
    recipe: Recipe, repeats: Sequence[AnalyzedRun], stated: Values, tolerance: Tolerance | None = None
) -> Verdict | Missing:
    """Judge runs of ``recipe`` by its published figure; Missing without one. ``stated`` are the runs' conditions."""
    figure = recipe.figure
    if figure is None:
        return Missing(f"no published figure: {recipe.expectations_reason}")
    published = _published(recipe, figure, stated.get(DEVICE))
    return _verdict_of_figure(figure, published, recipe.conditions, repeats, stated, tolerance)


def verdict_of_row(
    row: PublishedFigure, catalogue: Catalogue, run: AnalyzedRun, stated: Values, tolerance: Tolerance | None = None
) -> Verdict:
    """Judge a log by a published figure of a model that the catalogue does not describe."""
    figure = row.expectation
    document = catalogue.documents[figure.release]
    entries = catalogue.publications(figure.release).conditions
    conditions = [
        entry.record() for entry in entries if entry.holds_for(row.workload, row.size, row.dtype, row.gpu_type)
    ]
    published: dict[str, object] = {
        "program": document.framework,
        **{condition.key: condition.value for condition in conditions},
        DEVICE: _variant(row.gpu_type or "", stated.get(DEVICE)),
        "release": figure.release,
        "errata": "; ".join(figure.notes) or None,
        **{f"layout.{name}": row.sizes[name] for name in ("gbs", "seq_len")},
    }
    return _verdict_of_figure(figure, published, conditions, [run], stated, tolerance)


def _verdict_of_figure(
    figure: Expectation,
    published: Mapping[str, object],
    ways: Sequence[PublishedCondition],
    repeats: Sequence[AnalyzedRun],
    stated: Values,
    tolerance: Tolerance | None,
) -> Verdict:
    window = published_window(figure)
    reference = Reference(
        kind="published",
        step_time_s=figure.step_time_s,
        step_time_s_ci95=_interval(figure, window),
        window=window,
        window_text=_window_text(figure, window),
        convention=figure.convention,
        source=f"{figure.source} line {figure.line}",
    )
    own = {key: value for key, value in stated.items() if key in published}
    found = find_conditions(own, condition_values(published), reference.kind)
    known = {condition.key: condition for condition in ways}
    conditions = [_with_estimate(condition, known.get(condition.key)) for condition in found]
    return judge_against_figure(repeats, reference, conditions, tolerance or default_tolerance(reference.kind))


def _window_text(figure: Expectation, window: Window | None) -> str:
    if window is None or figure.window is None:
        return ""
    return figure.window if window.rule == figure.window else steps_text(window)


def _with_estimate(condition: Condition, published: PublishedCondition | None) -> Condition:
    if published is None:
        return condition
    slower = published.slower_pct if condition.own is not None else None
    return condition.model_copy(update={"slower_pct": slower, "why": f"{published.what} ({published.source})"})


def published_window(figure: Expectation) -> Window | None:
    """Return the steps that a figure averages; None if its document does not state them."""
    if figure.window is None:
        return None
    window = resolve_window(figure.window, DOCUMENTED_STEPS)
    if figure.averaged_steps == 1:
        return window
    return Window(first=window.first - figure.averaged_steps + 1, last=window.last, rule="A-B")


def documented_steps(recipe: Recipe, window: Window) -> str:
    """Return the steps that ``window`` averages in the document's software, which may print means of several steps."""
    figure = recipe.figure
    published = published_window(figure) if figure and window.rule == recipe.documented_window else None
    return steps_text(published or window)


def _interval(figure: Expectation, window: Window | None) -> tuple[float, float] | None:
    if figure.step_time_std_s is None or window is None or window.first == window.last:
        return None
    half = NORMAL_QUANTILE * figure.step_time_std_s / math.sqrt(window.last - window.first)
    return figure.step_time_s - half, figure.step_time_s + half


def _documented(run: AnalyzedRun, record: RunRecord) -> dict[str, Value]:
    plan, vboost = record.plan, record.vboost
    engine = isinstance(plan, EnginePlan) and record.program == ENGINE and plan
    return {
        **run.configuration,
        **run.conditions,
        "program": plan.documented_software or record.program,
        "data": record.origin.data.short,
        "lora": str(plan.lora) if plan.lora else None,
        "vboost": _vboost_text(vboost) if vboost else None,
        "peak_tflops": plan.recipe.peak_tflops,
        # Last, because documents' own scripts request vboost themselves.
        **(ways_of_engine(engine) if engine else _published_ways(plan.recipe) if plan.documented_software else {}),
    }


def ways_of_engine(plan: EnginePlan) -> dict[str, Value]:
    """Return the engine's values for published conditions, as its plan determines them, in the documents' terms."""
    even, path = plan.force_load_balancing or plan.capacity_factor == 1.0, plan.compute_path
    # Only for matrices in bf16, and in eager code not for layers that share a gathered input.
    whole_inputs = path.compiled or not path.overlaps_tp
    partly = "in part of the backward pass" if path.overlaps_tp else "none"
    by_product = path.gradient_sums == "by the product" and plan.fp8_recipe is None and whole_inputs
    return {
        "expert_rows": "even" if even else "as routed" if plan.capacity_factor is None else "with a margin",
        "cuda_graphs": "none",
        "tp_overlap": "with products" if path.fuses_tp else partly,
        "weight_gradients": "by the product" if by_product else "after the product",
        "step_clock": "whole steps",
    }


def _published_ways(recipe: Recipe) -> dict[str, Value]:
    ways: dict[str, Value] = {condition.key: condition.value for condition in recipe.conditions}
    if not recipe.shares_parameters:  # there is nothing to shard
        ways.pop("parallelism.dp_sharding", None)
    return ways


def _vboost_text(vboost: VboostOutcome) -> str:
    return "asked for" if vboost.nodes_set == vboost.nodes else f"set on {vboost.nodes_set} of {vboost.nodes} nodes"


def _published(recipe: Recipe, figure: Expectation, device: str | None) -> dict[str, object]:
    document, layout = recipe.document, recipe.layout
    squad = document and document.data == "squad"
    return {
        "program": document and document.framework,
        "window": (window := published_window(figure)) and steps_text(window),
        "data": dataset_title("squad", layout.seq_len) if squad else document and document.data,
        "lora": recipe.lora and str(recipe.lora),
        "emulate_fp8": False,
        "deterministic": False,
        "force_load_balancing": False,
        **_published_ways(recipe),
        # Recipes have figures of their own GPU type, and figures without a stated GPU type.
        **({DEVICE: _variant(recipe.gpu_type, device)} if figure.gpu_type_stated else {"gpu_type": None}),
        "release": figure.release,
        "peak_tflops": figure.peak_tflops,
        "errata": "; ".join(figure.notes) or None,
        **{f"layout.{name}": getattr(layout, name) for name in ("gbs", "seq_len", "layers")},
    }


def _variant(gpu_type: str, device: str | None) -> str | None:
    gpu = Catalogue().gpus.get(gpu_type)
    if gpu is None:
        return None
    return device if device and gpu.is_called(device) else gpu.name

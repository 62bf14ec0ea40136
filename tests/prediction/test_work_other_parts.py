# SPDX-License-Identifier: Apache-2.0
"""Predictions of models whose parts llmb's engine lacks, beside counts of parameters and FLOPs, and published steps."""

import re
from collections.abc import Iterator

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import stage_counts, stage_sizes
from llmb.catalogue.records import Layout, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.throughput import model_flops, parameter_count
from llmb.prediction.memory import estimate, settle_sharding
from llmb.prediction.prediction import default_calibration, predict
from llmb.prediction.work import RankWork
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
MODELS = [
    ("pretrain_deepseek-v3", "671b", "h100"),
    ("pretrain_gpt_oss", "120b", "h100"),
    ("pretrain_kimi-k2", "1t", "gb300"),
]


def plan_of(workload: str, size: str, gpu_type: str, **more: object) -> EnginePlan:
    request = Request(workload=workload, size=size, gpu_type=gpu_type, **more)
    return plan_for(resolve(CATALOGUE, request))


def plan_for(recipe: Recipe) -> EnginePlan:
    plan = make_plan(recipe, Choices(), device="cuda", trains=False)
    return settle_sharding(plan, Choices().parallelism)


def on_one_rank(plan: EnginePlan) -> EnginePlan:
    sizes = {"gpus": 1, "tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": 1, "mbs": 1, "gbs": 1}
    layout = plan.recipe.layout.model_copy(update=sizes)
    return plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"layout": layout, "scale": 1})})


@pytest.mark.parametrize(("workload", "size", "gpu_type"), MODELS[:2])
def test_the_whole_model_is_on_the_ranks_of_a_pipeline(workload: str, size: str, gpu_type: str) -> None:
    plan = plan_of(workload, size, gpu_type)
    model, layout = plan.recipe.model, plan.recipe.layout
    alone = on_one_rank(plan)
    dense, experts = RankWork(alone, None).parameters(0)
    last = model.layers - 1
    further = model.multi_token_layers * (
        parameter_count(model)[0] - parameter_count(model.model_copy(update={"layers": last}))[0]
    )
    assert dense + experts == pytest.approx(parameter_count(model)[0] + further, rel=1e-3)
    whole = sum(sum(RankWork(plan, None).parameters(rank)[1:]) for rank in range(layout.pp)) * layout.ep * layout.etp
    assert whole == experts


@pytest.mark.parametrize(("workload", "size", "gpu_type"), MODELS[:2])
def test_products_and_attention_are_those_of_the_counted_flops(workload: str, size: str, gpu_type: str) -> None:
    plan = on_one_rank(plan_of(workload, size, gpu_type))
    work = RankWork(plan, None)
    flops: dict[str, float] = dict(work.last().flops)
    for kind, layers in work.stages[0]:
        for name, each in work.layer(kind).flops.items():
            flops[name] = flops.get(name, 0) + layers * each
    # A backward pass of attention computes the scores again: 3.5 forward passes instead of 3.
    counted = sum(flops.values()) - flops["attention"] * (1 - 3 / 3.5)
    assert counted == pytest.approx(model_flops(plan.recipe.model, plan.recipe.layout.seq_len, causal=True), rel=0.01)


def published() -> Iterator[Recipe]:
    """Yield recipes with published steps in dtypes that are predicted."""
    names = [name for name, _, _ in MODELS]
    for figure in CATALOGUE.figures:
        if figure.workload in names and figure.dtype in ("bf16", "fp8"):
            asked = {"dtype": figure.dtype, "scale": figure.gpus, "gpu_type": figure.gpu_type}
            request = Request(workload=figure.workload, size=figure.size, release=figure.expectation.release, **asked)
            yield resolve(CATALOGUE, request)


def test_the_interval_covers_published_steps_and_its_source_names_the_largest_errors() -> None:
    calibration, errors = default_calibration(CATALOGUE.rates), CATALOGUE.rates.errors
    ratios = []
    for recipe in published():
        found = predict(plan_for(recipe), CATALOGUE.gpus[recipe.gpu_type], calibration, errors)
        assert recipe.figure
        low, high = found.interval_s
        assert low <= recipe.figure.step_time_s <= high, recipe.title()
        assert any("parts of the model" in line for line in found.unvalidated)
        ratios.append(recipe.figure.step_time_s / found.seconds)
    off = f"from {100 * (1 - min(ratios)):.0f} % less to {100 * (max(ratios) - 1):.0f} % more"
    text = f"{len(ratios)} published steps .* {off}"
    assert re.search(text, errors["parts"].source)


def test_memory_is_estimated_with_an_assumption() -> None:
    use = estimate(plan_of(*MODELS[0]))
    assert any(
        line.startswith("latent attention, router groups, dense layers, multi token layers") for line in use.assumptions
    )


def test_layers_that_do_not_divide_are_split_over_the_stages_after_the_first() -> None:
    layout = Layout(gpus=8, pp=8, mbs=1, gbs=8, seq_len=8, layers=61)
    assert stage_sizes(layout) == [7, 8, 8, 8, 8, 8, 7, 7]
    assert stage_counts(layout) is None
    counted = layout.model_copy(update={"counts_embedding_and_loss": True})
    assert sum(stage_sizes(counted)) == 61


def test_windows_save_flops_of_their_layers() -> None:
    short, long = (
        resolve(CATALOGUE, Request(workload="pretrain_gpt_oss", size="20b", overrides=Overrides(seq_len=tokens)))
        for tokens in (4096, 8192)
    )
    work = [RankWork(on_one_rank(plan_for(recipe)), None) for recipe in (short, long)]
    windows, whole = (
        [sum(w.layer(k).flops["attention"] for k, _ in w.stages[0] if k.attends_all is attends) for w in work]
        for attends in (False, True)
    )
    assert whole[1] == 4 * whole[0]
    assert windows[1] == pytest.approx(2 * windows[0], rel=0.02)

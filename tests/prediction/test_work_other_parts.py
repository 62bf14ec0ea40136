# SPDX-License-Identifier: Apache-2.0
"""Predictions of models whose parts llmb's engine lacks, beside counts of parameters and FLOPs, and published steps."""

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import stage_counts, stage_sizes
from llmb.catalogue.records import Layout, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.throughput import model_flops, parameter_count
from llmb.prediction.memory import estimate, settle_sharding
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
    parts = [(each, layers) for kind, layers in work.stages[0] for each in work.layer(kind)]
    parts += [(each, 1) for each in work.last()]
    # A backward pass of attention computes the scores again: 3.5 forward passes instead of 3.
    counted = sum(count * (sum(part.flops.values()) + part.attention * 3 / 3.5) for part, count in parts)
    assert counted == pytest.approx(model_flops(plan.recipe.model, plan.recipe.layout.seq_len, causal=True), rel=0.01)


def test_memory_is_estimated_with_an_assumption() -> None:
    use = estimate(plan_of(*MODELS[0]))
    parts = "latent attention, router groups, first layers without experts, multi token layers"
    assert any(line.startswith(parts) for line in use.assumptions)


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
        [sum(each.attention for each in w.layer(sorted(w.examples)[number])) for w in work] for number in (0, 1)
    )
    assert whole[1] == 4 * whole[0]
    assert windows[1] == pytest.approx(2 * windows[0], rel=0.02)


def test_hybrid_layers_are_refused_by_name() -> None:
    recipe = resolve(CATALOGUE, Request(workload="pretrain_nemotron3", size="30b", gpu_type="gb200"))
    with pytest.raises(UsageError, match="pretrain_nemotron3 30b has hybrid layers, which are not predicted"):
        make_plan(recipe, Choices(), device="cuda", trains=False)

# SPDX-License-Identifier: Apache-2.0
"""The search for layouts: nothing that fits is lost, and nothing that does not is proposed."""

from collections import Counter

import pytest

from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.prediction.memory import clearly_fits, estimate
from llmb.prediction.prediction import Prediction, default_calibration, predict
from llmb.prediction.search import Candidate, layouts, plan_to_search, predict_recipe, search, search_for, with_recipe
from llmb.runs.choices import Choices, Communication, Parallelism, keeps_logits
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
USUAL = default_calibration(CATALOGUE.rates)


def planned(size: str = "8b", scale: int = 8, workload: str = "pretrain_llama3.1", dtype: str = "bf16") -> EnginePlan:
    request = Request(workload=workload, size=size, dtype=dtype, gpu_type="h100", scale=scale)
    return make_plan(resolve(CATALOGUE, request), Choices(), device="cuda")


def predicted(plan: EnginePlan) -> Prediction:
    return predict(plan, CATALOGUE.gpus["h100"], USUAL, CATALOGUE.rates.errors)


@pytest.mark.parametrize("size, scale", [("8b", 8), ("8b", 128), ("70b", 64), ("405b", 512), ("405b", 128)])
def test_the_published_layout_is_among_those_that_are_tried(size: str, scale: int) -> None:
    plan = planned(size, scale)
    wanted = plan.recipe.layout
    if wanted.counts_embedding_and_loss and wanted.pp > 1:
        less = wanted.pipeline_layers // (wanted.pp * wanted.vp) - 1
        ends = {"counts_embedding_and_loss": False, "first_stage_layers": less, "last_stage_layers": less}
        wanted = wanted.model_copy(update=ends)
    else:
        wanted = wanted.model_copy(update={"counts_embedding_and_loss": False})
    tried = list(layouts(plan, Counter()))
    assert wanted in tried
    assert len(set(tried)) == len(tried)
    assert not any(check_layout(plan.recipe.model, each) for each in tried)


@pytest.mark.parametrize(("way", "name"), [("halves", "ep"), ("fused", "tp")])
def test_layouts_that_cannot_communicate_as_required_are_not_tried(way: Communication, name: str) -> None:
    choices = Choices(communication=way)
    recipe = planned("8x7b", 64, "pretrain_mixtral").recipe
    plan = plan_to_search(recipe, choices)
    tried = list(layouts(plan, Counter(), {"pp": 1, "cp": 1}))
    assert plan.communication == way
    assert {getattr(each, name) for each in tried} == {2, 4, 8}
    own = predict_recipe(recipe, choices, predicted)
    assert isinstance(own, Missing) == (way == "fused")


def test_what_is_proposed_fits_and_the_fastest_is_first() -> None:
    plan = planned()
    found = search(plan, predicted)
    times = [each.prediction.seconds for each in found.fitting]
    assert times == sorted(times)
    assert times[0] <= predicted(plan).seconds
    assert all(clearly_fits(estimate(each.plan)) for each in found.fitting)
    assert found.searched == len(found.fitting) + sum(found.left_out.values())
    for each in found.fitting[:5]:
        layout = each.plan.recipe.layout
        assert (layout.gpus, layout.gbs, layout.seq_len) == (8, 128, 8192)
        assert predicted(each.plan).seconds == pytest.approx(each.prediction.seconds)


def test_what_is_specified_holds_for_every_layout() -> None:
    plan = planned("70b", 64)
    for sizes in ({"tp": 8}, {"tp": 2, "cp": 16}, {"mbs": 2, "vp": 2}, {"pp": 4, "first_stage_layers": 17}):
        tried = list(layouts(plan, Counter(), sizes))
        assert tried
        assert not any(check_layout(plan.recipe.model, each) for each in tried)
        assert all(getattr(each, name) == value for each in tried for name, value in sizes.items())
    limits = {"pp": 4, "mbs": 2, "recompute": "selective", "dp_sharding": "full", "max_memory_gib": 60.0}
    found = search(plan, predicted, limits)
    assert {(one.plan.recompute, one.plan.parallelism.dp_sharding) for one in found.fitting} == {("selective", "full")}
    assert max(each.memory.needed_gib for each in found.fitting) <= 60
    assert found.searched == len(found.fitting) + sum(found.left_out.values())


def test_shards_of_a_size_are_in_every_layout() -> None:
    sharded = planned("70b", 64).model_copy(update={"parallelism": Parallelism(dp_sharding="full", dp_shard_size=4)})
    found = search(sharded, predicted, {"tp": 4, "mbs": 1}).fitting
    assert found
    for each in found:
        assert each.plan.parallelism.dp_shard_size == 4
        assert not any(each.plan.parallelism.problems(each.plan.recipe.layout))


def test_gradients_are_reduced_by_micro_batch_only_where_a_layout_does_not_fit_otherwise() -> None:
    sizes = {"tp": 1, "pp": 1, "cp": 1, "mbs": 1, "recompute": "full"}
    plan = planned("70b", 64)
    (synced,) = search(plan, predicted, sizes).fitting
    assert synced.plan.syncs_each_pass
    assert not search(plan, predicted, {**sizes, "gradient_sync": "step"}).fitting
    (chosen,) = search(plan, predicted, {**sizes, "gradient_sync": "micro-batch"}).fitting
    assert chosen == synced
    (small,) = search(planned("8b", 8), predicted, sizes).fitting
    assert not small.plan.syncs_each_pass


def test_between_two_ranks_accumulated_gradients_may_fit_where_shards_do_not() -> None:
    sizes = {"tp": 4, "pp": 1, "cp": 1, "mbs": 1, "recompute": "full", "dp_sharding": "full"}
    plan = planned("8b", 8)
    (once,) = search(plan, predicted, {**sizes, "gradient_sync": "step"}).fitting
    (synced,) = search(plan, predicted, {**sizes, "gradient_sync": "micro-batch"}).fitting
    assert once.plan.recipe.layout.dp == 2 and once.memory.needed_gib < synced.memory.needed_gib
    limit = (once.memory.needed_gib + synced.memory.needed_gib) / 2
    (fitting,) = search(plan, predicted, {**sizes, "max_memory_gib": limit}).fitting
    assert fitting == once


def test_logits_are_kept_as_in_a_run_with_that_layout() -> None:
    found = search(planned("8b", 8), predicted).fitting
    assert all(each.plan.keep_logits == keeps_logits(each.plan.recipe) for each in found)
    assert len({each.plan.keep_logits for each in found}) == 2


def test_a_layout_that_does_not_divide_is_no_obstacle() -> None:
    request = Request(
        workload="pretrain_llama3.1", size="70b", gpu_type="h100", scale=36, overrides=Overrides(gbs=72, seq_len=4096)
    )
    recipe = resolve(CATALOGUE, request, check=False)
    own = predict_recipe(recipe, Choices(), predicted)
    assert isinstance(own, Missing)
    assert "number of GPUs 36 is not divisible by TP x PP x CP" in own.reason
    found = search(plan_to_search(recipe, Choices()), predicted).fitting
    assert found
    assert {each.plan.recipe.layout.gbs for each in found} == {72}


def test_no_layout_that_is_slower_than_a_fitting_recipe_comes_first() -> None:
    """The recipe's own fits, but not clearly enough to be found by the search."""
    recipe = planned("15b", 16, "pretrain_nemotron4", dtype="fp8").recipe
    own = predict_recipe(recipe, Choices(), predicted)
    found = search(plan_to_search(recipe, Choices()), predicted)
    assert isinstance(own, Candidate) and found.fitting[0].prediction.seconds > own.prediction.seconds
    assert with_recipe(found, own, {}).fitting[0] is own
    assert with_recipe(found, own, {"tp": 4}) is found
    assert with_recipe(found, own, {"max_memory_gib": own.memory.needed_gib - 0.1}) is found
    assert with_recipe(found, Missing("it does not divide"), {}) is found


def test_experts_are_spread() -> None:
    tried = list(layouts(planned("8x7b", 64, "pretrain_mixtral"), Counter()))
    assert {each.ep for each in tried} == {1, 2, 4, 8}
    assert all(each.etp in (1, each.tp) for each in tried)
    assert any(each.etp > 1 for each in tried)


@pytest.mark.slow
def test_the_cheapest_token_comes_first() -> None:
    found = search_for("token", planned("8b", 8), predicted).fitting
    prices = [one.prediction.seconds * one.plan.recipe.scale for one in found]
    assert prices == sorted(prices)
    assert {one.plan.recipe.scale for one in found} == {2, 4, 8}

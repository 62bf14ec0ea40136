# SPDX-License-Identifier: Apache-2.0
"""The search for layouts: nothing that fits is lost, and nothing that does not is proposed."""

from collections import Counter

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.resolve import Request, resolve
from llmb.predict.memory import clearly_fits, estimate
from llmb.predict.prediction import Prediction, default_calibration, predict
from llmb.predict.search import layouts, search, search_for
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
USUAL = default_calibration(CATALOGUE.rates)


def planned(size: str = "8b", scale: int = 8, workload: str = "pretrain_llama3.1") -> EnginePlan:
    request = Request(workload=workload, size=size, dtype="bf16", gpu_type="h100", scale=scale)
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


def test_what_is_proposed_fits_and_the_fastest_is_first() -> None:
    plan = planned()
    found = search(plan, predicted)
    times = [each.prediction.seconds for each in found.found]
    assert times == sorted(times)
    assert times[0] <= predicted(plan).seconds
    assert all(clearly_fits(estimate(each.plan)) for each in found.found)
    assert found.searched == len(found.found) + sum(found.left_out.values())
    for each in found.found[:5]:
        layout = each.plan.recipe.layout
        assert (layout.gpus, layout.gbs, layout.seq_len) == (8, 128, 8192)
        assert predicted(each.plan).seconds == pytest.approx(each.prediction.seconds)


def test_experts_are_spread() -> None:
    tried = list(layouts(planned("8x7b", 64, "pretrain_mixtral"), Counter()))
    assert {each.ep for each in tried} == {1, 2, 4, 8}
    assert all(each.etp in (1, each.tp) for each in tried)
    assert any(each.etp > 1 for each in tried)


@pytest.mark.slow
def test_the_cheapest_token_comes_first() -> None:
    found = search_for("token", planned("8b", 8), predicted).found
    prices = [one.prediction.seconds * one.plan.recipe.scale for one in found]
    assert prices == sorted(prices)
    assert {one.plan.recipe.scale for one in found} == {2, 4, 8}

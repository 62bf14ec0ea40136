# SPDX-License-Identifier: Apache-2.0
"""Scales, failures and energy on paper."""

import random
from dataclasses import replace

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.prediction.prediction import Prediction, default_calibration, predict
from llmb.prediction.scale import MOST_GPUS, goodput, joules_per_token, scale_up, training_cost, what_if
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
H100 = CATALOGUE.gpus["h100"]
USUAL = default_calibration(CATALOGUE.rates)


def planned(size: str, scale: int) -> EnginePlan:
    request = Request(workload="pretrain_llama3.1", size=size, dtype="bf16", gpu_type="h100", scale=scale)
    return make_plan(resolve(CATALOGUE, request), Choices(), device="cuda")


def predicted(plan: EnginePlan) -> Prediction:
    return predict(plan, H100, USUAL, CATALOGUE.rates.errors)


def test_weak_scaling_keeps_the_work_of_a_gpu_and_loses_little() -> None:
    curve = scale_up(planned("8b", 8), "weak", predicted)
    assert curve.scales[-1].gpus == MOST_GPUS
    assert len({one.prediction.plan.recipe.layout.ga for one in curve.scales}) == 1
    efficiencies = [one.efficiency for one in curve.scales]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[0] == 1
    assert efficiencies[4] == pytest.approx(12.27 / 12.33, abs=0.01)  # as published on 8 and 128 GPUs


def test_strong_scaling_ends_with_the_batch_and_names_what_grew() -> None:
    curve = scale_up(planned("405b", 512), "strong", predicted)
    assert [one.gpus for one in curve.scales] == [512, 1024, 2048, 4096]
    assert {one.prediction.plan.recipe.layout.gbs for one in curve.scales} == {256}
    assert curve.scales[-1].grew
    assert curve.scales[-1].grew[0] == "pipeline bubble"
    assert curve.ends.startswith("batch size: 256 sequences leave a replica 8 micro-batches")


def test_goodput_is_that_of_simulated_failures() -> None:
    gpus, mtbf_h, save_s, restart_s = 2048, 50_000.0, 60.0, 600.0
    found = goodput(gpus, mtbf_h, save_s, restart_s)
    drawn, trained, passed = random.Random(3), 0.0, 0.0
    failure = drawn.expovariate(1 / found.between_failures_s)
    for _ in range(200_000):
        segment = found.interval_s + save_s
        if failure < segment:
            passed += failure + restart_s
            failure = drawn.expovariate(1 / found.between_failures_s)
            continue
        trained += found.interval_s
        passed += segment
        failure -= segment
    assert found.part == pytest.approx(trained / passed, abs=0.005)
    more, fewer = (goodput(gpus * scale, mtbf_h, save_s, restart_s).part for scale in (8, 1))
    assert 0 < more < fewer < 1
    assert goodput(10**6, 100.0, save_s, restart_s).part == 0


def test_energy_is_at_most_that_of_the_power_limit() -> None:
    prediction = predicted(planned("8b", 8))
    joules = joules_per_token(prediction)
    assert joules == pytest.approx(700 * 8 * prediction.seconds / (128 * 8192))
    cost = training_cost(prediction, 15e12, 2.5)
    assert cost.days == pytest.approx(15e12 / (128 * 8192) * prediction.seconds / 86_400)
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * 8)
    assert cost.price == pytest.approx(2.5 * cost.gpu_hours)
    assert cost.energy_mwh_at_most == pytest.approx(0.7e-3 * cost.gpu_hours)
    unlimited = replace(prediction, gpu=H100.model_copy(update={"tdp_w": None}))
    assert joules_per_token(unlimited) is training_cost(unlimited, 1e12).energy_mwh_at_most is None


def test_tp_beyond_an_nvlink_domain_is_named_with_what_it_adds() -> None:
    sizes = Overrides(tp=8, pp=1, vp=1, cp=1, gbs=128)
    request = Request(workload="pretrain_llama3.1", size="70b", gpu_type="h100", scale=8, overrides=sizes)
    plan = make_plan(resolve(CATALOGUE, request), Choices(), device="cuda")
    by_domain = {
        gpus: predict(plan, H100.model_copy(update={"nvlink_domain_gpus": gpus}), USUAL, CATALOGUE.rates.errors)
        for gpus in (8, 4)
    }
    assert by_domain[8].beyond_nvlink == ()
    (found,) = by_domain[4].beyond_nvlink  # no other group has more than one rank
    assert found.added_s == pytest.approx(by_domain[4].seconds - by_domain[8].seconds)
    assert found.added_s > 1
    assert found.text == "TP over 8 GPUs spans 2 NVLink domains of 4"


def test_slower_links_and_gpus_make_a_step_longer_and_more_gpus_shorter() -> None:
    plan = planned("70b", 64)
    found = {each.change: each for each in what_if(plan, H100, USUAL, CATALOGUE.rates.errors)}
    assert [*found] == [
        "NVLink at half its rate",
        "one GPU 10 % slower",
        "network at half its rate",
        "twice the GPUs, the same batch",
    ]
    assert 8 < found["one GPU 10 % slower"].longer_pct < 10
    assert found["NVLink at half its rate"].longer_pct > found["network at half its rate"].longer_pct > 0
    assert -50 < found["twice the GPUs, the same batch"].longer_pct < -40
    alone = what_if(planned("8b", 8), H100, USUAL, CATALOGUE.rates.errors)
    assert "network at half its rate" not in [each.change for each in alone]

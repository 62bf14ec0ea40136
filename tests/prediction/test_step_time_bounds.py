# SPDX-License-Identifier: Apache-2.0
"""Properties that predictions have for any model, layout and hardware."""

from random import Random
from typing import NamedTuple

import pytest
from tests.prediction.test_memory_random_layouts import random_layout

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Gpu
from llmb.prediction.links import Links
from llmb.prediction.prediction import chip_rates, default_calibration, predict, rates_of
from llmb.prediction.step_time import TERMS, Rates, nominal_step
from llmb.prediction.work import Messages
from llmb.runs.plan import EnginePlan

CATALOGUE = Catalogue()
SOFTWARE = tuple(CATALOGUE.rates.software)
QUICK, ALL = 100, 2000
BETTER = ("memory_bandwidth_tb_s", "nvlink_gb_s", "network_gb_s")
LITTLE = 1e-9
"""Relative error of floating-point sums."""


class Case(NamedTuple):
    """A plan on hardware, by software."""

    plan: EnginePlan
    gpu: Gpu
    software: str

    def seconds(self, gpu: Gpu | None = None, software: str | None = None, plan: EnginePlan | None = None) -> float:
        gpu, rates = gpu or self.gpu, rates_of(CATALOGUE.rates, software or self.software)
        rates = chip_rates(rates, gpu.relative_efficiency)
        return nominal_step(plan or self.plan, gpu, rates).seconds(rates)


def random_case(seed: int) -> Case:
    """Return a random layout on a GPU whose figures are 1/16 to 16 times those of an H100."""
    random = Random(seed)
    usual = CATALOGUE.gpus["h100"]
    figures: dict[str, object] = {name: getattr(usual, name) * 2 ** random.uniform(-4, 4) for name in BETTER}
    figures["peak_tflops"] = {name: peak * 2 ** random.uniform(-4, 4) for name, peak in usual.peak_tflops.items()}
    figures["nvlink_domain_gpus"] = random.choice((1, 2, 8, 72))
    figures["sms"] = random.choice((None, 48, 132, 304))
    figures["relative_efficiency"] = random.choice((None, 0.8, 1.1))
    return Case(random_layout(seed, CATALOGUE).plan, usual.model_copy(update=figures), random.choice(SOFTWARE))


CASES = pytest.mark.parametrize(
    "seeds", [range(QUICK), pytest.param(range(QUICK, ALL), marks=pytest.mark.measured)], ids=["quick", "all"]
)


@CASES
def test_better_hardware_never_makes_a_step_longer(seeds: range) -> None:
    for case in map(random_case, seeds):
        usual = case.seconds() * (1 + LITTLE)
        for name in BETTER:
            assert case.seconds(case.gpu.model_copy(update={name: 2 * getattr(case.gpu, name)})) <= usual, (case, name)
        peaks = {name: 2 * peak for name, peak in case.gpu.peak_tflops.items()}
        assert case.seconds(case.gpu.model_copy(update={"peak_tflops": peaks})) <= usual, case


@CASES
def test_less_optimized_software_never_makes_a_step_shorter(seeds: range) -> None:
    for case in map(random_case, seeds):
        plain = case.seconds(software="plain") * (1 + LITTLE)
        assert case.seconds(software="llmb") <= plain, case
        assert case.seconds(software="torchtitan") <= plain, case
        again = case.plan.model_copy(update={"recompute": "full"})
        assert case.seconds() <= case.seconds(plan=again) * (1 + LITTLE), case


@CASES
def test_twice_the_micro_batches_take_at_most_twice_the_time_and_at_least_their_own(seeds: range) -> None:
    for case in map(random_case, seeds):
        recipe = case.plan.recipe
        layout = recipe.layout.model_copy(update={"gbs": 2 * recipe.layout.gbs})
        twice = case.plan.model_copy(update={"recipe": recipe.model_copy(update={"layout": layout})})
        once, both = case.seconds(), case.seconds(plan=twice)
        assert once < both <= 2 * once * (1 + LITTLE), case


@CASES
def test_no_exposed_message_is_faster_than_its_link_and_no_work_hides_more_than_its_length(seeds: range) -> None:
    """Messages that nothing hides take at least their bytes at the nominal rate; a step takes at least as long as the
    messages of any group less all computation."""
    for case in map(random_case, seeds):
        rates = chip_rates(rates_of(CATALOGUE.rates, case.software), case.gpu.relative_efficiency)
        plain = chip_rates(rates_of(CATALOGUE.rates, "plain"), case.gpu.relative_efficiency)
        hidden, exposed = (nominal_step(case.plan, case.gpu, each) for each in (rates, plain))
        for group in ("tp", "cp", "pp", "ep", "dp"):
            travel = group_seconds(exposed.busy, plain, group)
            computed = case.seconds() - group_seconds(hidden.busy, rates, group)
            left = group_seconds(hidden.busy, rates, group)
            assert left + computed * (1 + LITTLE) >= least(case, travel, group), (case, group)


def group_seconds(busy: dict[str, float], rates: Rates, group: str) -> float:
    names = (group, f"{group}_fp8", f"{group}_beyond")
    return sum(busy.get(name, 0.0) * rates[name] for name in names if name in TERMS)


def least(case: Case, travel: float, group: str) -> float:
    """Copies of a token that go to one node may be joined, which is not hiding."""
    joins = group == "ep" and CATALOGUE.rates.software[case.software].ep_joins_copies
    return 0.0 if joins else travel


@CASES
def test_messages_take_at_least_their_bytes_at_the_nominal_rate(seeds: range) -> None:
    for case in map(random_case, seeds):
        replicas = case.plan.parallelism.replicas(case.plan.recipe.layout)
        links = Links(case.plan.recipe.layout, replicas, case.gpu, 1.0, 1.0, {})
        for group, (ranks, within) in links.groups.items():
            one = Messages("all_gather", group, 1, 1e9)  # type: ignore[arg-type]
            rate = case.gpu.nvlink_gb_s / 2 if ranks <= within else within * (case.gpu.network_gb_s or 0)
            assert links.travel(one) >= (ranks - 1) / ranks / max(rate, LITTLE) * (1 - LITTLE), (case, group)


@CASES
def test_what_tp_and_ep_beyond_nvlink_add_is_a_part_of_the_step(seeds: range) -> None:
    for case in map(random_case, seeds):
        calibration = default_calibration(CATALOGUE.rates, case.software)
        found = predict(case.plan, case.gpu, calibration, CATALOGUE.rates.errors)
        layout, domain = case.plan.recipe.layout, case.gpu.nvlink_domain_gpus
        spans = {"TP": layout.tp, "EP": layout.etp * layout.ep}
        assert {each.group: each.gpus for each in found.beyond_nvlink} == {
            name: gpus for name, gpus in spans.items() if gpus > domain
        }, case
        slower = (case.gpu.network_gb_s or 0) <= case.gpu.nvlink_gb_s / 4
        for each in found.beyond_nvlink:
            assert each.added_s < found.seconds, (case, each)
            assert not slower or each.added_s >= -LITTLE * found.seconds, (case, each)


@CASES
def test_the_parts_of_a_prediction_sum_to_it_and_its_name_does_not_matter(seeds: range) -> None:
    for case in map(random_case, seeds):
        calibration = default_calibration(CATALOGUE.rates, case.software)
        found = predict(case.plan, case.gpu, calibration, CATALOGUE.rates.errors)
        assert sum(found.terms.values()) == pytest.approx(found.seconds)
        assert all(seconds >= 0 for seconds in found.terms.values())
        renamed = case.gpu.model_copy(update={"gpu_type": "other"})
        assert predict(case.plan, renamed, calibration, CATALOGUE.rates.errors).seconds == found.seconds
        low, high = found.interval_s
        assert low < found.seconds < high
        foreign = predict(
            case.plan, case.gpu.model_copy(update={"is_foreign": True}), calibration, CATALOGUE.rates.errors
        )
        assert foreign.interval_s[0] < low and foreign.interval_s[1] > high

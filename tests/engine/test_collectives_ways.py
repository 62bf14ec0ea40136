# SPDX-License-Identifier: Apache-2.0
"""Ways of communication compute the same numbers, also if every collective completes only when it is waited for."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from llmb.runs.choices import Communication, Parallelism
from llmb.runs.plan import Plan

LLAMA, NEMOTRON = "pretrain_llama3.1", "pretrain_nemotron4"
MAVERICK, MIXTRAL = "finetune_llama4-maverick", "pretrain_mixtral"
SIZES = {"gbs": 4, "seq_len": 64, "layers": 2}
Case = tuple[str, int, dict[str, Any], dict[str, Any]]
"""Workload, ranks, sizes, choices."""
FP8 = {"dtype": "fp8"}
SUMMED = {"dtype": "bf16", "grad_reduce_dtype": "bf16"}
BALANCED = FP8 | {"force_load_balancing": True}
QUICK: dict[str, Case] = {
    "TP2": (LLAMA, 2, {"tp": 2}, FP8),
    "TP2, bf16": (LLAMA, 2, {"tp": 2, "mbs": 2}, {"dtype": "bf16"}),
    "EP2": (MAVERICK, 2, {"ep": 2}, {"dtype": "bf16", "capacity_factor": 0.0}),
    "TP2, current, sequences of 2": (LLAMA, 2, {"tp": 2, "mbs": 2}, FP8 | {"fp8_recipe": "current-all"}),
}
SLOW: dict[str, Case] = {
    "TP2, compiled": (LLAMA, 2, {"tp": 2}, FP8 | {"compiled": True}),
    "TP2, bf16, sums in products": (LLAMA, 2, {"tp": 2}, SUMMED | {"compiled": True}),
    "TP2, bf16, recomputed": (LLAMA, 2, {"tp": 2}, SUMMED | {"compiled": True, "recompute": "selective"}),
    "TP2, compiled, recomputed": (LLAMA, 2, {"tp": 2}, FP8 | {"compiled": True, "recompute": "selective"}),
    "TP2, recomputed": (NEMOTRON, 2, {"tp": 2}, FP8 | {"recompute": "full"}),
    "DP2 x TP2": (LLAMA, 4, {"tp": 2, "layers": 3}, FP8 | {"fp8_recipe": "current"}),
    "TP2 x PP2 x VP2": (LLAMA, 4, {"tp": 2, "pp": 2, "vp": 2, "layers": 4}, FP8),
    "EP2, compiled, recomputed": (MAVERICK, 2, {"ep": 2}, BALANCED | {"compiled": True, "recompute": "selective"}),
    "EP2, recomputed": (MAVERICK, 2, {"ep": 2}, BALANCED | {"recompute": "full"}),
    "EP2, selective": (MAVERICK, 2, {"ep": 2}, BALANCED | {"recompute": "selective"}),
    "DP2 x EP2": (MAVERICK, 4, {"ep": 2}, {"dtype": "bf16", "capacity_factor": 1.5}),
    "PP2 x EP2": (MAVERICK, 4, {"pp": 2, "ep": 2, "layers": 4}, FP8 | {"capacity_factor": 0.0}),
    "TP2 x EP2 x ETP2": (MAVERICK, 4, {"tp": 2, "ep": 2, "etp": 2}, FP8 | {"capacity_factor": 0.0}),
}
HALVES: dict[str, Case] = {
    "EP2": (MIXTRAL, 2, {"ep": 2}, {}),
    "EP2, balanced": (MIXTRAL, 2, {"ep": 2}, {"force_load_balancing": True}),
    "EP2, FP8": (MIXTRAL, 2, {"ep": 2}, FP8),
}
MORE_HALVES: dict[str, Case] = {
    "EP2, optimizer": (MIXTRAL, 2, {"ep": 2}, {"parallelism": Parallelism(dp_sharding="optimizer")}),
    "EP2, by micro-batch": (
        MIXTRAL,
        2,
        {"ep": 2},
        {"parallelism": Parallelism(dp_sharding="full", gradient_sync="micro-batch")},
    ),
    "EP2, recomputed": (MIXTRAL, 2, {"ep": 2}, {"recompute": "full"}),
    "EP2, compiled": (MIXTRAL, 2, {"ep": 2}, {"compiled": True}),
    "EP2, compiled, selective": (MIXTRAL, 2, {"ep": 2}, {"compiled": True, "recompute": "selective"}),
    "EP2, shared expert": (MAVERICK, 2, {"ep": 2}, {"capacity_factor": 0.0}),
    "DP2 x EP2": (MIXTRAL, 4, {"ep": 2}, {"force_load_balancing": True}),
    "PP2 x EP2": (MIXTRAL, 4, {"pp": 2, "ep": 2, "layers": 4}, {}),
    "TP2 x EP2 x ETP2": (MIXTRAL, 4, {"tp": 2, "ep": 2, "etp": 2}, {}),
    "TP2 x EP4": (MIXTRAL, 4, {"tp": 2, "ep": 4}, FP8 | {"fp8_recipe": "current-all"}),
}
EXACT = tuple(way for way in get_args(Communication) if way != "halves")


def differences(
    cases: dict[str, Case], tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> list[str]:
    """What of each case and way is not, to the last digit, as with plain communication."""
    found = []
    for ranks in sorted({ranks for _, ranks, *_ in cases.values()}):
        plans, names = list[Plan](), list[str]()
        for name, (workload, number, sizes, choices) in cases.items():
            for way in EXACT if number == ranks else ():
                plan = tiny_plan(workload, ranks, **{"steps": 3, "overrides": SIZES | sizes, **choices})
                plans.append(plan.model_copy(update={"communication": way}))  # fused ones need GPUs
                names.append(name if way == "plain" else f"{name}: {way}")
        found += compared(dict(zip(names, train_plans(plans), strict=True)))
        pairs = zip(names, plans, strict=True)
        # Selective recomputation and the compiler recognize operators, which late ones replace.
        eager = {name: plan for name, plan in pairs if not plan.compiled and plan.recompute != "selective"}
        late = dict(zip(eager, train_plans([*eager.values()], late=True), strict=True))
        found += [f"late: {each}" for each in compared(late)]
    return found


def compared(found: dict[str, dict[str, Any]]) -> list[str]:
    pairs = {name: (one, found[name.partition(": ")[0]]) for name, one in found.items()}
    return [
        f"{name}: {kind}" for name, (one, plain) in pairs.items() for kind in plain if not equal(one[kind], plain[kind])
    ]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


def test_ways_compute_the_same_numbers(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> None:
    assert differences(QUICK, tiny_plan, train_plans) == []


@pytest.mark.measured
def test_ways_compute_the_same_numbers_in_other_layouts(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> None:
    assert differences(SLOW, tiny_plan, train_plans) == []


def assert_halves_compute_the_same(
    cases: dict[str, Case], tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> None:
    """To the rounding of sums over halves, which FP8 enlarges; and exactly so if collectives complete late."""
    for ranks in sorted({ranks for _, ranks, *_ in cases.values()}):
        chosen = [case for case in cases.values() if case[1] == ranks]
        plans = [
            tiny_plan(name, ranks, steps=3, overrides=SIZES | sizes, **options) for name, _, sizes, options in chosen
        ]
        halves = [plan.model_copy(update={"communication": "halves"}) for plan in plans]
        whole, split = train_plans(plans), train_plans(halves)
        for plan, one, other in zip(halves, whole, split, strict=True):
            tolerance = 1e-5 if plan.recipe.dtype == "fp32" else 3e-3
            assert other["losses"] == pytest.approx(one["losses"], rel=tolerance)
            assert other["norms"] == pytest.approx(one["norms"], rel=10 * tolerance)
        eager = [number for number, plan in enumerate(halves) if not plan.compiled and plan.recompute != "selective"]
        late = train_plans([halves[number] for number in eager], late=True)
        for number, found in zip(eager, late, strict=True):
            assert all(equal(found[kind], split[number][kind]) for kind in found), chosen[number]


def test_halves_of_the_tokens_of_experts_compute_the_same(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> None:
    assert_halves_compute_the_same(HALVES, tiny_plan, train_plans)


@pytest.mark.measured
def test_halves_compute_the_same_in_other_layouts(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> None:
    assert_halves_compute_the_same(MORE_HALVES, tiny_plan, train_plans)

# SPDX-License-Identifier: Apache-2.0
"""Ways of communication compute the same numbers, also if every collective completes only when it is waited for."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from llmb.runs.choices import Communication
from llmb.runs.plan import Plan

LLAMA, NEMOTRON, MAVERICK = "pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"
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


def differences(
    cases: dict[str, Case], tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[dict[str, Any]]]
) -> list[str]:
    """What of each case and way is not, to the last digit, as with plain communication."""
    found = []
    for ranks in sorted({ranks for _, ranks, *_ in cases.values()}):
        plans, names = list[Plan](), list[str]()
        for name, (workload, number, sizes, choices) in cases.items():
            for way in get_args(Communication) if number == ranks else ():
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

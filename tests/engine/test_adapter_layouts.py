# SPDX-License-Identifier: Apache-2.0
"""However a model with adapters is spread over ranks, they start and learn as on one process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from llmb.catalogue.records import Lora
from llmb.runs.choices import Parallelism
from llmb.runs.plan import Plan

STEPS, GBS = 3, 4
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5, "later": 5e-4}
"""Those of docs/reference/layouts.md, but for later norms: there are only few parameters, and AdamW's first updates are
as large for those whose gradient is mostly rounding."""
LLAMA, WITHOUT_SP = "finetune_llama3", {"sequence_parallel": False}
References, Distances = Callable[..., Path], Callable[..., dict[str, float]]


class Case(NamedTuple):
    """Ranks, what the layout sets, and further options."""

    ranks: int
    sizes: dict[str, int | bool]
    options: Mapping[str, object] = MappingProxyType({})
    targets: tuple[str, ...] = ("qkv", "all-linear")


DROPOUT = {"lora_dropout": 0.3}
CASES = {
    "TP2 + SP, dropout": Case(2, {"tp": 2}, DROPOUT),
    "PP2 x VP2": Case(2, {"pp": 2, "vp": 2}),
    "split": Case(2, {"tp": 2}, targets=("qkv-split", "attention")),
    "FSDP2, dropout": Case(2, {"layers": 2}, {**DROPOUT, "recompute": "full"}),
    "FSDP2, recomputed and compiled": Case(2, {}, {**DROPOUT, "recompute": "full", "compiled": True}),
    "FSDP2, gathered once": Case(2, {}, {"parallelism": Parallelism(dp_sharding="optimizer")}),
    "DP2": Case(2, {}, {"parallelism": Parallelism(dp_sharding="none")}),
    "TP2": Case(2, {"tp": 2, **WITHOUT_SP}),
    "TP2 + SP, selective": Case(2, {"tp": 2}, {"recompute": "selective", "compiled": True}),
    "PP2": Case(2, {"pp": 2}, {"recompute": "full"}),
    "CP2": Case(2, {"cp": 2}),
    "TP2 x CP2, dropout": Case(4, {"tp": 2, "cp": 2}, DROPOUT),
    "FSDP2 x TP2 x PP2": Case(8, {"tp": 2, "pp": 2}, {"recompute": "full"}),
}
QUICK, SLOW = ("TP2 + SP, dropout", "all-linear"), ("split",)


def marks_of(name: str, targets: str) -> tuple[pytest.MarkDecorator, ...]:
    """The fused projection alone is measured: it is one of all layers."""
    if (name, targets) == QUICK:
        return ()
    return (pytest.mark.slow if name in SLOW and targets != "qkv" else pytest.mark.measured,)


def assert_within_bounds(differences: dict[str, float]) -> None:
    trained = [name for name in differences if name.startswith("gradient of ")]
    assert trained
    assert all("adapter." in name for name in trained)
    assert {name: value for name, value in differences.items() if not value <= BOUNDS[name.split()[0]]} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param(name, targets, marks=marks_of(name, targets))
        for name, case in CASES.items()
        for targets in case.targets
    ],
)
def test_adapters_train_in_every_layout_as_on_one_process(
    name: str, targets: str, tiny_plan: Callable[..., Plan], references: References, distances: Distances
) -> None:
    ranks, sizes, options, _ = CASES[name]
    common = {"steps": STEPS, "lora_targets": targets, "lora_dropout": options.get("lora_dropout")}
    alone_sizes = {"gbs": GBS} | {name: size for name, size in sizes.items() if name == "layers"}
    alone = tiny_plan(LLAMA, scale=1, overrides=alone_sizes, **common)
    spread = tiny_plan(LLAMA, scale=ranks, overrides={"gbs": GBS, **sizes}, **common | options)
    reference = references("layout_reference.py", alone.model_dump(mode="json"), 1)
    assert_within_bounds(distances(spread.model_dump(mode="json"), reference))


@pytest.mark.slow
def test_adapters_beside_frozen_experts_train_as_on_one_process(
    tiny_plan: Callable[..., Plan], references: References, distances: Distances
) -> None:
    """Experts have no adapters. In the kind of layout that their model's fine-tuning has."""
    lora = Lora(rank=8, alpha=16, dropout=0, targets="attention")

    def plan_of(ranks: int, **sizes: int) -> dict[str, object]:
        plan = tiny_plan("finetune_llama4-maverick", scale=ranks, steps=STEPS, overrides={"gbs": GBS, **sizes})
        # Which tokens a capacity drops depends on the layout.
        return plan.model_copy(update={"lora": lora, "capacity_factor": None}).model_dump(mode="json")

    reference = references("layout_reference.py", plan_of(1), 1)
    assert_within_bounds(distances(plan_of(4, tp=2, ep=2, etp=2), reference))

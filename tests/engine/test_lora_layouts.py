# SPDX-License-Identifier: Apache-2.0
"""However a model with adapters is spread over ranks, they start and learn as on one process."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from llmb.catalogue.records import Lora
from llmb.runs.parallelism import Parallelism
from llmb.runs.plan import Plan

HERE = Path(__file__).parent
WORKER, REFERENCE = HERE / "layout_worker.py", HERE / "layout_reference.py"
LIMIT_S = 600
STEPS, GBS = 3, 4
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5, "later": 5e-4}
"""Those of docs/reference/layouts.md, but for later norms: there are only few parameters, and AdamW's first updates are
as large for those whose gradient is mostly rounding."""
LLAMA, WITHOUT_SP = "finetune_llama3", {"sequence_parallel": False}


class Case(NamedTuple):
    """Ranks, what the layout sets, and further options."""

    ranks: int
    sizes: dict[str, int | bool]
    options: Mapping[str, object] = MappingProxyType({})
    targets: tuple[str, ...] = ("qkv", "all-linear")


DROPOUT = {"lora_dropout": 0.3}
QUICK = {"TP2 + SP, dropout": Case(2, {"tp": 2}, DROPOUT)}
SLOW = {
    "PP2 x VP2": Case(2, {"pp": 2, "vp": 2}),
    "split": Case(2, {"tp": 2}, targets=("qkv-split", "attention")),
    "FSDP2, dropout": Case(2, {}, {**DROPOUT, "recompute": "full", "compiled": True}),
}
MEASURED = {
    "TP2 + SP": Case(2, {"tp": 2}),
    "FSDP2": Case(2, {}),
    "FSDP2, recomputed and compiled": Case(2, {}, {"recompute": "full", "compiled": True}),
    "FSDP2, gathered once": Case(2, {}, {"parallelism": Parallelism(dp_sharding="optimizer")}),
    "DP2": Case(2, {}, {"parallelism": Parallelism(dp_sharding="none")}),
    "TP2": Case(2, {"tp": 2, **WITHOUT_SP}),
    "TP2 + SP, selective": Case(2, {"tp": 2}, {"recompute": "selective", "compiled": True}),
    "PP2": Case(2, {"pp": 2}, {"recompute": "full"}),
    "CP2": Case(2, {"cp": 2}),
    "TP2 x CP2, dropout": Case(4, {"tp": 2, "cp": 2}, DROPOUT),
    "FSDP2 x TP2 x PP2": Case(8, {"tp": 2, "pp": 2}, {"recompute": "full"}),
}


@pytest.fixture(scope="session")
def compare(
    tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case, str], dict[str, float]]:
    """How far the ranks of a case lie from one process, by name; references are made once."""
    references: dict[tuple[str, object], Path] = {}

    def reference(targets: str, dropout: object) -> Path:
        if (targets, dropout) not in references:
            folder = tmp_path_factory.mktemp("reference")
            options = {"lora_targets": targets, "lora_dropout": dropout}
            plan = tiny_plan(LLAMA, scale=1, steps=STEPS, overrides={"gbs": GBS}, **options)
            (folder / "plan.json").write_text(plan.model_dump_json())
            run_ranks(REFERENCE, 1, folder / "plan.json", folder / "found.pt", 1, limit_s=LIMIT_S)
            references[targets, dropout] = folder / "found.pt"
        return references[targets, dropout]

    def found(case: Case, targets: str) -> dict[str, float]:
        folder = tmp_path_factory.mktemp("case")
        sizes = {"gbs": GBS, **case.sizes}
        plan = tiny_plan(LLAMA, scale=case.ranks, steps=STEPS, overrides=sizes, lora_targets=targets, **case.options)
        made_by = str(reference(targets, case.options.get("lora_dropout")))
        made = {"plan": plan.model_dump(mode="json"), "reference": made_by}
        (folder / "case.json").write_text(json.dumps(made))
        return json.loads(run_ranks(WORKER, case.ranks, folder, limit_s=LIMIT_S)[0])

    return found


def assert_within_bounds(differences: dict[str, float]) -> None:
    trained = [name for name in differences if name.startswith("gradient of ")]
    assert trained
    assert all("adapter." in name for name in trained)
    assert {name: value for name, value in differences.items() if not value <= BOUNDS[name.split()[0]]} == {}


@pytest.mark.parametrize("name", QUICK)
def test_adapters_train_in_a_layout_as_on_one_process(
    name: str, compare: Callable[[Case, str], dict[str, float]]
) -> None:
    assert_within_bounds(compare(QUICK[name], "all-linear"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.measured)
        for name in [*QUICK, *SLOW, *MEASURED]
    ],
)
def test_adapters_train_in_every_layout_as_on_one_process(
    name: str, compare: Callable[[Case, str], dict[str, float]]
) -> None:
    case = {**QUICK, **SLOW, **MEASURED}[name]
    for targets in case.targets:
        assert_within_bounds(compare(case, targets))


@pytest.mark.slow
def test_adapters_beside_frozen_experts_train_as_on_one_process(
    tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Of a model with experts, which have no adapters, in the kind of layout that its fine-tuning has."""
    lora = Lora(rank=8, alpha=16, dropout=0, targets="attention")

    def plan_of(ranks: int, **sizes: int) -> str:
        plan = tiny_plan("finetune_llama4-maverick", scale=ranks, steps=STEPS, overrides={"gbs": GBS, **sizes})
        # Which tokens a capacity drops depends on the layout.
        return plan.model_copy(update={"lora": lora, "capacity_factor": None}).model_dump_json()

    (tmp_path / "plan.json").write_text(plan_of(1))
    run_ranks(REFERENCE, 1, tmp_path / "plan.json", tmp_path / "found.pt", 1, limit_s=LIMIT_S)
    case = {"plan": json.loads(plan_of(4, tp=2, ep=2, etp=2)), "reference": str(tmp_path / "found.pt")}
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert_within_bounds(json.loads(run_ranks(WORKER, 4, tmp_path, limit_s=LIMIT_S)[0]))

# SPDX-License-Identifier: Apache-2.0
"""Training on packs is training on their documents one by one, whatever the layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_data
import pytest

from llmb.runs.plan import EnginePlan, TrainingDataset

LLAMA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"
GBS, STEPS = 4, 2
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5, "later": 1e-4}
"""As for layouts: relative but for losses."""
MakePlan = Callable[..., EnginePlan]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrainingDataset:
    """Of three packs only, so that the second step begins another epoch in its middle."""
    return packed_data.small_dataset(tmp_path_factory.mktemp("dataset") / "packed", packs=3)


@pytest.fixture(scope="module")
def make_plan(tiny_plan: MakePlan, dataset: TrainingDataset) -> Callable[..., dict[str, Any]]:
    def make(workload: str, scale: int = 1, **sizes: int) -> dict[str, Any]:
        # The layouts of a recipe whose task is LoRA are those of the model that is trained as a whole.
        of_model = "pretrain_llama3.1" if workload == LLAMA else workload
        plan = tiny_plan(of_model, scale=scale, steps=STEPS, overrides={"gbs": GBS, **sizes})
        # Which tokens a capacity drops depends on the tokens that a rank has.
        return plan.model_copy(update={"dataset": dataset, "capacity_factor": None}).model_dump(mode="json")

    return make


@pytest.mark.parametrize(
    ("workload", "ranks", "sizes"),
    [
        pytest.param(LLAMA, 1, {}, id="llama"),
        pytest.param(LLAMA, 2, {"cp": 2}, id="llama, CP2", marks=pytest.mark.measured),
        pytest.param(LLAMA, 2, {"pp": 2}, id="llama, PP2"),
        pytest.param(MAVERICK, 1, {}, id="maverick", marks=pytest.mark.measured),
        pytest.param(MAVERICK, 2, {"cp": 2}, id="maverick, CP2", marks=pytest.mark.measured),
        pytest.param(MAVERICK, 2, {"pp": 2}, id="maverick, PP2", marks=pytest.mark.measured),
        # TP8 x EP32 x ETP8 of the document on 256 GPUs, small: every rank holds other experts, or other shards of them.
        pytest.param(MAVERICK, 4, {"tp": 2, "ep": 2, "etp": 2}, id="TP2 x EP2 x ETP2", marks=pytest.mark.slow),
        pytest.param(MAVERICK, 8, {"tp": 2, "ep": 4, "etp": 2}, id="TP2 x EP4 x ETP2", marks=pytest.mark.measured),
        pytest.param(MAVERICK, 4, {"cp": 2, "pp": 2}, id="CP2 x PP2", marks=pytest.mark.measured),
    ],
)
def test_packs_are_trained_on_as_their_documents_one_by_one(
    workload: str,
    ranks: int,
    sizes: dict[str, int],
    make_plan: Callable[..., dict[str, Any]],
    references: Callable[..., Path],
    distances: Callable[..., dict[str, float]],
) -> None:
    found = distances(make_plan(workload, ranks, **sizes), references("unpacked_reference.py", make_plan(workload)))
    assert any(name.startswith("gradient") for name in found)
    assert {name: value for name, value in found.items() if not value <= BOUNDS[name.split()[0]]} == {}

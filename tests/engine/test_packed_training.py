# SPDX-License-Identifier: Apache-2.0
"""Training on packs is training on their documents one by one, whatever the layout."""

import json
from collections.abc import Callable
from pathlib import Path

import packed_data
import pytest

from llmb.runs.plan import EnginePlan, TrainingDataset

HERE = Path(__file__).parent
WORKER, REFERENCE = HERE / "layout_worker.py", HERE / "unpacked_reference.py"
LLAMA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"
GBS, STEPS = 4, 2
BOUNDS = {"value": 0.0, "gradient": 1e-5, "loss": 1e-5, "norm": 1e-5, "later": 1e-4}
"""As for layouts: relative but for losses."""
MakePlan = Callable[..., EnginePlan]
Unpacked = Callable[[str], Path]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrainingDataset:
    """Of three packs only, so that the second step begins another epoch in its middle."""
    return packed_data.small_dataset(tmp_path_factory.mktemp("dataset") / "packed", packs=3)


@pytest.fixture(scope="module")
def make_plan(tiny_plan: MakePlan, dataset: TrainingDataset) -> MakePlan:
    def make(workload: str, scale: int = 1, **sizes: int) -> EnginePlan:
        # The layouts of a recipe whose task is LoRA are those of the model that is trained as a whole.
        of_model = "pretrain_llama3.1" if workload == LLAMA else workload
        plan = tiny_plan(of_model, scale=scale, steps=STEPS, overrides={"gbs": GBS, **sizes})
        # Which tokens a capacity drops depends on the tokens that a rank has.
        return plan.model_copy(update={"dataset": dataset, "capacity_factor": None})

    return make


@pytest.fixture(scope="module")
def unpacked(
    make_plan: MakePlan, tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[str]]
) -> Unpacked:
    """What a training finds in which every document is a sequence of its own."""
    made: dict[str, Path] = {}

    def train(workload: str) -> Path:
        if workload not in made:
            folder = tmp_path_factory.mktemp("unpacked")
            (folder / "plan.json").write_text(make_plan(workload).model_dump_json())
            made[workload] = folder / "reference.pt"
            run_ranks(REFERENCE, 1, folder / "plan.json", made[workload])
        return made[workload]

    return train


def differences(
    plan: EnginePlan, reference: Path, folder: Path, run_ranks: Callable[..., list[str]]
) -> dict[str, float]:
    (folder / "case.json").write_text(json.dumps({"plan": plan.model_dump(mode="json"), "reference": str(reference)}))
    found: dict[str, float] = json.loads(run_ranks(WORKER, plan.recipe.layout.gpus, folder)[0])
    assert any(name.startswith("gradient") for name in found)
    return {name: value for name, value in found.items() if not value <= BOUNDS[name.split()[0]]}


@pytest.mark.parametrize(
    ("workload", "sizes"),
    [
        pytest.param(LLAMA, {}, id="llama"),
        pytest.param(LLAMA, {"cp": 2}, id="llama, CP2", marks=pytest.mark.measured),
        pytest.param(LLAMA, {"pp": 2}, id="llama, PP2"),
        pytest.param(MAVERICK, {}, id="maverick", marks=pytest.mark.measured),
        pytest.param(MAVERICK, {"cp": 2}, id="maverick, CP2"),
        pytest.param(MAVERICK, {"pp": 2}, id="maverick, PP2", marks=pytest.mark.measured),
    ],
)
def test_packs_are_trained_on_as_their_documents_one_by_one(
    workload: str,
    sizes: dict[str, int],
    make_plan: MakePlan,
    unpacked: Unpacked,
    tmp_path: Path,
    run_ranks: Callable[..., list[str]],
) -> None:
    plan = make_plan(workload, scale=2 if sizes else 1, **sizes)
    assert differences(plan, unpacked(workload), tmp_path, run_ranks) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(4, {"tp": 2, "ep": 2, "etp": 2}, id="TP2 x EP2 x ETP2"),
        pytest.param(8, {"tp": 2, "ep": 4, "etp": 2}, id="FSDP4 x TP2 x EP4 x ETP2", marks=pytest.mark.measured),
        pytest.param(4, {"cp": 2, "pp": 2}, id="CP2 x PP2", marks=pytest.mark.measured),
    ],
)
def test_full_fine_tuning_with_experts_over_ranks_is_that_of_one_process(
    ranks: int,
    sizes: dict[str, int],
    make_plan: MakePlan,
    unpacked: Unpacked,
    tmp_path: Path,
    run_ranks: Callable[..., list[str]],
) -> None:
    """TP8 x EP32 x ETP8 of the document on 256 GPUs, small: every rank holds other experts, or other shards of them."""
    plan = make_plan(MAVERICK, scale=ranks, **sizes)
    assert differences(plan, unpacked(MAVERICK), tmp_path, run_ranks) == {}

# SPDX-License-Identifier: Apache-2.0
"""Runs that start with a checkpoint's weights, and checkpoints of adapters."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import Fork, ForkServer
from free_ports import free_ports
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

import llmb.engine
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.data.build import build_data
from llmb.engine.model.adapter import is_of_adapter
from llmb.errors import UsageError
from llmb.huggingface.config import config_of
from llmb.programs.engine.conversion import ImportRequest, import_checkpoint
from llmb.runs.checkpoint import SavedCheckpoint, read_checkpoint, saved_checkpoints
from llmb.runs.claim import create_run_folder
from llmb.runs.folder import RunFolder
from llmb.runs.initial_weights import check_weights
from llmb.runs.plan import InitialWeights, Plan
from llmb.runs.record import new_record, write_record
from llmb.runs.steps import read_steps

WORKER = Path(llmb.engine.__file__).parent / "worker.py"
pytestmark = pytest.mark.slow
LORA, PRETRAIN = "finetune_llama3", "pretrain_llama3.1"
SIZES = {"gbs": 2}
ENDS_WITHIN_S = 300
NAME = "llmb/llama3-tiny"

MakePlan = Callable[..., Plan]
Train = Callable[..., RunFolder]


def tiny(workload: str) -> Model:
    return find_model(Catalogue(), workload, "tiny")


def hugging_face(workload: str, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A model with random weights, and its files in ``folder``."""
    torch.manual_seed(5)
    config = LlamaForCausalLM.config_class(**config_of(tiny(workload), "fp32"), attn_implementation="eager")
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


def imported(workload: str, folder: Path, dtype: torch.dtype) -> tuple[nn.Module, SavedCheckpoint]:
    model = hugging_face(workload, folder / "model", dtype)
    request = ImportRequest(folder / "model", folder / "imported", workload, tiny(workload), 1)
    import_checkpoint(request, lambda _done, _total: None, lambda _note: None)
    return model, read_checkpoint(folder / "imported")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, SavedCheckpoint]:
    """transformers' model in bf16, and the checkpoint that was made from it."""
    return imported(LORA, tmp_path_factory.mktemp("base"), torch.bfloat16)


@pytest.fixture
def train(fork_server: ForkServer, tmp_path: Path) -> Train:
    """Runs the workers of a plan to their end."""

    def run(plan: Plan, fails: bool = False) -> RunFolder:
        folder = create_run_folder(tmp_path / str(len(list(tmp_path.iterdir()))), plan)
        write_record(folder, new_record(plan, ()))
        size, (port,) = plan.recipe.layout.gpus, free_ports(1)
        ranks = [
            Fork(
                fork_server,
                [str(WORKER), str(folder.path)],
                {
                    **os.environ,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": str(size),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "OMP_NUM_THREADS": "1",
                },
                folder.log,
            )
            for rank in range(size)
        ]
        codes = [rank.wait(timeout=ENDS_WITHIN_S) for rank in ranks]
        assert any(codes) is fails, folder.log.read_text()
        return folder

    return run


def starting(plan: Plan, checkpoint: SavedCheckpoint | None) -> Plan:
    weights = checkpoint and InitialWeights(path=str(checkpoint.path), name=NAME)
    return plan.model_copy(update={"weights": weights})


def losses(folder: RunFolder) -> list[float]:
    return [step.loss for step in read_steps(folder.steps)]


def first_loss(model: nn.Module, plan: Plan) -> float:
    """Of transformers' model on the samples of the first step, in fp32."""
    batch = build_data(plan).micro_batch(range(plan.recipe.layout.gbs))
    logits = model.float()(batch.tokens).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()


def test_adapters_begin_with_the_weights_and_are_saved_alone(
    base: tuple[nn.Module, SavedCheckpoint], tiny_plan: MakePlan, train: Train
) -> None:
    """Stored in bf16, computed in fp32 on two ranks; the run resumes exactly, and only beside the same weights."""
    model, checkpoint = base
    options: dict[str, Any] = {"workload": LORA, "overrides": SIZES, "lora_targets": "all-linear"}
    plan = starting(tiny_plan(steps=4, checkpoint_interval=2, **options), checkpoint)
    whole = train(plan)
    assert losses(whole)[0] == pytest.approx(first_loss(model, plan), abs=1e-4)
    saved, _ = saved_checkpoints(whole.checkpoints_of(plan))
    assert saved.record.lora == plan.lora
    assert saved.record.base is not None
    assert (saved.record.base.path, saved.record.base.name) == (str(checkpoint.path), NAME)
    names = tensor_names(saved)
    assert all(is_of_adapter(name) for name in names if not name.startswith("random."))
    assert len([name for name in names if name.startswith("model.")]) == 4 * 7 * 2

    resumed = tiny_plan(steps=2, checkpoint=saved, **options)
    assert resumed.weights == plan.weights
    assert losses(train(resumed)) == losses(whole)[2:]
    with pytest.raises(UsageError, match=f"belong to the weights of {NAME} .* but the run has random weights"):
        check_weights(starting(resumed, None))


def tensor_names(checkpoint: SavedCheckpoint) -> list[str]:
    return list(TensorReader(checkpoint.path / "weights").read_metadata().state_dict_metadata)

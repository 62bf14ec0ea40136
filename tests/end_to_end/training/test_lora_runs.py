# SPDX-License-Identifier: Apache-2.0
"""Runs that start with a checkpoint's weights, and checkpoints of adapters."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Lora, Model
from llmb.catalogue.resolve import find_model
from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.data.build import build_data
from llmb.engine.model.adapter import is_of_adapter
from llmb.runs.checkpoint_use import check_weights
from llmb.runs.checkpoints.checkpoint import SavedCheckpoint, read_checkpoint, saved_checkpoints
from llmb.runs.choices import Choices
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import RunFolder
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.plan import InitialWeights, Plan
from llmb.runs.planning import NotPrepared, plan_training
from llmb.runs.record import new_record, write_record
from llmb.runs.steps import read_steps
from llmb.setup.prepare.conversion import ImportRequest, import_checkpoint

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
def base(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> tuple[nn.Module, SavedCheckpoint]:
    """transformers' model in bf16, and the checkpoint that was made from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked_python)
        return imported(LORA, tmp_path_factory.mktemp("base"), torch.bfloat16)


@pytest.fixture
def train(start_ranks: Callable[..., list[Any]], tmp_path: Path) -> Train:
    """Runs the workers of a plan to their end."""

    def run(plan: Plan) -> RunFolder:
        folder = create_run_folder(tmp_path / str(len(list(tmp_path.iterdir()))), plan)
        write_record(folder, new_record(plan, ()))
        ranks = start_ranks(["-m", "llmb.engine.worker", str(folder.path)], plan.recipe.layout.gpus, folder.log)
        assert {rank.wait(timeout=ENDS_WITHIN_S) for rank in ranks} == {0}, folder.log.read_text()
        return folder

    return run


def starting(plan: Plan, checkpoint: SavedCheckpoint | None) -> Plan:
    weights = checkpoint and InitialWeights(path=str(checkpoint.path), name=NAME)
    return plan.model_copy(update={"weights": weights})


def starts_from(plan: Plan) -> tuple[str, str]:
    assert plan.weights is not None
    return plan.weights.path, plan.weights.name


def losses(folder: RunFolder) -> list[float]:
    return [step.loss for step in read_steps(folder.steps)]


def first_loss(model: nn.Module, plan: Plan) -> float:
    """Of transformers' model on the samples of the first step, in fp32."""
    first = plan.samples_before(plan.first_step)
    batch = build_data(plan).micro_batch(range(first, first + plan.recipe.layout.gbs))
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
    assert starts_from(resumed) == starts_from(plan)
    assert losses(train(resumed)) == losses(whole)[2:]
    with pytest.raises(UsageError, match=f"belong to the weights of {NAME} .* but the run has random weights"):
        check_weights(starting(resumed, None))


def tensor_names(checkpoint: SavedCheckpoint) -> list[str]:
    return list(TensorReader(checkpoint.path / "weights").read_metadata().state_dict_metadata)


@pytest.fixture(scope="module")
def command(forked_python: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``llmb checkpoint``."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [forked_python, "-m", "llmb.cli.main", "checkpoint", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    return call


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("targets", [pytest.param("qkv", marks=pytest.mark.measured), "all-linear"])
def test_adapters_and_merged_weights_compute_in_peft_what_they_do_here(
    targets: str,
    base: tuple[nn.Module, SavedCheckpoint],
    tiny_plan: MakePlan,
    train: Train,
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """Trained adapters: in the next step's loss, in peft, merged, and imported again."""
    model, checkpoint = base
    options: dict[str, Any] = {"workload": LORA, "overrides": SIZES, "lora_targets": targets, "peak_lr": 0.01}
    plan = starting(tiny_plan(scale=1, steps=3, warmup_steps=0, save_checkpoint=True, **options), checkpoint)
    (saved,) = saved_checkpoints(train(plan).checkpoints_of(plan))
    following = tiny_plan(scale=1, steps=1, checkpoint=saved, workload=LORA, overrides=SIZES)
    next_loss = losses(train(following))[0]
    tokens = build_data(plan).micro_batch(range(2)).tokens

    exported, merged = tmp_path / "exported", tmp_path / "merged"
    assert command("export", saved.path, exported).returncode == 0
    assert command("export", saved.path, merged, "--merge").returncode == 0
    model.float().save_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), exported).eval()
    whole = LlamaForCausalLM.from_pretrained(merged).eval()
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (expected - model(tokens).logits).abs().max() > 0.01  # the adapters matter
        assert (whole(tokens).logits - expected).abs().max() <= 1e-4
    assert next_loss == pytest.approx(first_loss(theirs, following), abs=1e-4)

    back = tmp_path / "back"
    done = command("import", exported, back, "-w", LORA, "-s", "tiny", "--base", checkpoint.path)
    assert done.returncode == 0, done.stderr
    record = read_checkpoint(back).record
    assert (record.lora, record.optimizer_state) == (saved.record.lora, False)
    again = tiny_plan(scale=1, steps=1, checkpoint=read_checkpoint(back), workload=LORA, overrides=SIZES)
    assert starts_from(again) == (str(checkpoint.path), NAME)
    assert losses(train(again))[0] == pytest.approx(first_loss(theirs, again), abs=1e-4)
    shown = command("show", back).stdout
    assert "adapters only: LoRA, rank 16, alpha 32, dropout 0" in " ".join(shown.split())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_made_by_peft_train_here(
    base: tuple[nn.Module, SavedCheckpoint],
    tiny_plan: MakePlan,
    train: Train,
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    _, checkpoint = base
    model = hugging_face(LORA, tmp_path / "model", torch.bfloat16).float()
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False)  # the targets that peft has for Llama
    theirs = get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    back = tmp_path / "back"
    done = command("import", tmp_path / "adapter", back, "-w", LORA, "-s", "tiny", "--base", checkpoint.path)
    assert done.returncode == 0, done.stderr
    sizes = {**SIZES, "tp": 2}
    plan = tiny_plan(steps=1, checkpoint=read_checkpoint(back), workload=LORA, overrides=sizes)
    assert plan.lora == Lora(rank=4, alpha=8, dropout=0, targets="qv")
    assert losses(train(plan))[0] == pytest.approx(first_loss(theirs, plan), abs=1e-4)

    moved, data = shutil.copytree(checkpoint.path, tmp_path / "moved"), tmp_path / "install"
    choices = Choices(steps=1, load_checkpoint=str(back), weights=str(moved))
    with pytest.raises(NotPrepared) as caught:  # for its data alone
        plan_training(Catalogue(), plan.recipe, choices, data)
    assert starts_from(caught.value.plan)[0] == str(moved)
    assert "prepare checkpoint" not in caught.value.what


@pytest.mark.usefixtures("forked_programs")
def test_all_weights_of_a_checkpoint_in_bf16_are_fine_tuned(tiny_plan: MakePlan, train: Train, tmp_path: Path) -> None:
    """Full fine-tuning, in a layout; a resumed run does not read them again."""
    model, checkpoint = imported(PRETRAIN, tmp_path / "own", torch.bfloat16)
    plan = tiny_plan(PRETRAIN, steps=2, save_checkpoint=True, overrides={**SIZES, "tp": 2})
    folder = train(starting(plan, checkpoint))
    assert losses(folder)[0] == pytest.approx(first_loss(model, plan), abs=1e-4)
    (saved,) = saved_checkpoints(folder.checkpoints_of(plan))
    resumed = tiny_plan(PRETRAIN, steps=1, checkpoint=saved, overrides=SIZES)
    (checkpoint.path / "weights" / ".metadata").unlink()
    assert losses(train(starting(resumed, checkpoint)))[0] < losses(folder)[0]


def test_weights_of_another_model_are_refused(base: tuple[nn.Module, SavedCheckpoint], tiny_plan: MakePlan) -> None:
    with pytest.raises(UsageError, match=r"run cannot start with these weights:\n  - .* another model: rope_scaling"):
        check_weights(starting(tiny_plan(PRETRAIN), base[1]))

# SPDX-License-Identifier: Apache-2.0
"""What a fine-tuning run starts from: prepared, named, synthetic, or refused with the commands that prepare it."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from prepared_files import prepare_checkpoint, prepare_dataset

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.origin import Origin
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan
from llmb.runs.planning import NotPrepared, plan_training

CATALOGUE = Catalogue()
MAVERICK, PRETRAIN = "finetune_llama4-maverick", "pretrain_llama3.1"
LORA = "finetune_llama3"


def plan(install: Path, workload: str = MAVERICK, **choices: object) -> EnginePlan:
    overrides = Overrides(**choices.pop("overrides", {}))
    recipe = resolve(CATALOGUE, Request(workload=workload, size="tiny", gpu_type="cpu", scale=2, overrides=overrides))
    return plan_training(CATALOGUE, recipe, Choices(**choices), install)


def refusal(install: Path, workload: str = MAVERICK, **choices: object) -> str:
    with pytest.raises(UsageError) as caught:
        plan(install, workload, **choices)
    return caught.value.text()


def test_what_is_not_prepared_is_refused_with_both_commands(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert f"llmb prepare checkpoint -w {MAVERICK} -s tiny --source small/model\n" in said
    assert f"llmb prepare dataset -w {MAVERICK} -s tiny --source small/squad.jsonl\n" in said
    assert f"run 'llmb prepare sample small -w {MAVERICK} -s tiny' if there is no folder small, then" in said
    weights = prepare_checkpoint(tmp_path / "other", MAVERICK)
    assert "--source small/squad.jsonl --tokenizer small/model\n" in refusal(tmp_path, weights=str(weights))
    prepare_checkpoint(tmp_path, MAVERICK)
    with pytest.raises(NotPrepared, match=r" --seq-len 256 --source small/squad.jsonl\n") as caught:
        plan(tmp_path, overrides={"seq_len": 256})
    assert "prepare checkpoint" not in caught.value.text()
    assert caught.value.plan.origin.text.endswith("llmb/llama4-maverick-tiny; data: squad-tiny packed 256")


def test_what_is_prepared_is_the_start_and_its_statistics_are_the_runs(tmp_path: Path) -> None:
    checkpoint, dataset = prepare_checkpoint(tmp_path, MAVERICK), prepare_dataset(tmp_path, MAVERICK)
    found = plan(tmp_path)
    assert found.weights is not None
    assert (found.weights.path, found.weights.name) == (str(checkpoint), "llmb/llama4-maverick-tiny")
    assert found.dataset is not None
    assert found.dataset.path == str(dataset)
    data = "squad-tiny packed 128, from /data/training.jsonl"
    assert found.origin.text == f"weights: checkpoint llmb/llama4-maverick-tiny; data: {data}"
    assert found.origin.weights.identity
    assert found.origin.data.identity
    packing = found.recipe.packing
    assert packing is not None
    # Two packs: documents of 100 and 20 places, and of 60.
    assert (packing.tokens, packing.sum_of_squares) == (90, (100**2 + 20**2 + 60**2) / 2)
    # The model attends within chunks of 64.
    assert packing.chunked_sum_of_squares == (64**2 + 36**2 + 20**2 + 60**2) / 2
    assert found.recipe.training.document_tokens is None


def test_a_dataset_of_another_tokenizer_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    checkpoint = prepare_checkpoint(tmp_path, MAVERICK)
    (checkpoint / "context").mkdir()
    (checkpoint / "context" / "tokenizer.json").write_bytes(b"{}")
    name = "llmb/llama4-maverick-tiny"
    tokenizer = {"name": name, "sha256": sha256(b"{}").hexdigest(), "vocab_size": 256, "bos_id": 0, "eos_id": 1}
    prepare_dataset(tmp_path, MAVERICK, tokenizer=tokenizer)
    assert plan(tmp_path).dataset
    (checkpoint / "context" / "tokenizer.json").write_bytes(b"{ }")
    said = refusal(tmp_path)
    assert "the tokenizer of the dataset in" in said
    assert f"llmb prepare dataset -w {MAVERICK} -s tiny --force" in said
    assert plan(tmp_path, synthetic=True).dataset is None


def test_what_is_named_replaces_what_is_prepared(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    checkpoint, dataset = prepare_checkpoint(elsewhere, MAVERICK), prepare_dataset(elsewhere, MAVERICK)
    found = plan(tmp_path, weights=str(checkpoint), dataset=str(dataset))
    assert found.weights is not None
    assert found.weights.path == str(checkpoint)
    assert found.dataset is not None
    assert found.dataset.path == str(dataset)


def test_synthetic_uses_nothing_that_is_prepared(tmp_path: Path) -> None:
    checkpoint, _ = prepare_checkpoint(tmp_path, MAVERICK), prepare_dataset(tmp_path, MAVERICK)
    found = plan(tmp_path, synthetic=True)
    assert (found.weights, found.dataset) == (None, None)
    assert (found.origin.weights.kind, found.origin.data.kind) == ("random", "synthetic")
    assert "synthetic" in found.origin.text
    assert "omit one of them" in refusal(tmp_path, synthetic=True, weights=str(checkpoint))


def test_pre_training_may_begin_with_weights_but_has_no_dataset(tmp_path: Path) -> None:
    assert plan(tmp_path, PRETRAIN).origin.text == "weights: random; data: synthetic zipf"
    other = prepare_checkpoint(tmp_path, MAVERICK)
    assert "of another model" in refusal(tmp_path, PRETRAIN, weights=str(other))
    own = prepare_checkpoint(tmp_path, PRETRAIN, "own")
    assert plan(tmp_path, PRETRAIN, weights=str(own)).origin.weights.name == "own"
    dataset = prepare_dataset(tmp_path, MAVERICK)
    assert "trains on synthetic tokens" in refusal(tmp_path, PRETRAIN, dataset=str(dataset))


def test_a_proxy_needs_synthetic(tmp_path: Path) -> None:
    prepare_checkpoint(tmp_path, MAVERICK)
    prepare_dataset(tmp_path, MAVERICK)
    layers = {"layers": 2}
    assert "PROXY (2 of 4 layers) cannot load the weights of the whole model; add --synthetic" in refusal(
        tmp_path, overrides=layers
    )
    assert plan(tmp_path, overrides=layers, synthetic=True).weights is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_len": 64}, "has packs of 64 tokens"),
        ({"split": "validation"}, "is the validation split"),
        ({"vocab_size": 5000}, "has a vocabulary of 5000"),
        ({"files": {"tokens.npy": 5}}, r"is damaged: tokens.npy has "),
        ({"files": {"tokens.npy.2": 5}}, "is damaged: tokens.npy.2 is missing; prepare it again with --force"),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    prepare_checkpoint(tmp_path, MAVERICK)
    dataset = prepare_dataset(tmp_path, MAVERICK, **changes)
    assert reason in refusal(tmp_path, dataset=str(dataset))


def test_a_dataset_of_another_model_is_refused(tmp_path: Path) -> None:
    for workload in (MAVERICK, "finetune_llama3"):
        prepare_checkpoint(tmp_path, workload)
    other = prepare_dataset(tmp_path, "finetune_llama3")
    said = refusal(tmp_path, dataset=str(other))
    assert "was tokenized for llmb/llama3-tiny; the run trains llmb/llama4-maverick-tiny" in said


def test_a_folder_without_a_dataset_is_said_to_have_none(tmp_path: Path) -> None:
    prepare_checkpoint(tmp_path, MAVERICK)
    above = prepare_dataset(tmp_path, MAVERICK).parent
    assert f"there is no dataset in {above}; pass the folder that" in refusal(tmp_path, dataset=str(above))


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    checkpoint, dataset = prepare_checkpoint(tmp_path, MAVERICK), prepare_dataset(tmp_path, MAVERICK)
    (checkpoint / "weights" / "__0_0.distcp").unlink()
    said = refusal(tmp_path)
    assert "__0_0.distcp is missing" in said
    assert "llmb prepare checkpoint" in said
    (dataset / "dataset.json").write_text("{}")
    assert "cannot be read" in refusal(tmp_path)
    assert "--document-tokens is for synthetic data" in refusal(tmp_path, document_tokens=20)


def resumable(install: Path, origin: Origin, workload: str = MAVERICK, **changes: object) -> str:
    """A checkpoint of a run."""
    path = prepare_checkpoint(install / "run", workload)
    record = read_checkpoint(path).record
    of_run = {"imported_from": None, "origin": origin, "step": 4, "consumed_samples": 32}
    changed = record.model_copy(update={**of_run, **changes})
    (path / "checkpoint.json").write_text(changed.model_dump_json())
    return str(path)


def test_a_resumed_run_has_the_origin_that_its_checkpoint_records(tmp_path: Path) -> None:
    prepare_checkpoint(tmp_path, MAVERICK)
    dataset = prepare_dataset(tmp_path, MAVERICK)
    began = plan(tmp_path)
    saved = resumable(tmp_path, began.origin)
    found = plan(tmp_path, load_checkpoint=saved)
    assert found.origin == began.origin
    assert found.dataset == began.dataset
    assert "omit --synthetic" in refusal(tmp_path, load_checkpoint=saved, synthetic=True)
    record = json.loads((dataset / "dataset.json").read_text())
    record["crc32"]["tokens.npy"] = "00000000"
    (dataset / "dataset.json").write_text(json.dumps(record))
    assert "not the one that the checkpoint was trained on" in refusal(tmp_path, load_checkpoint=saved)


def test_a_resumed_run_without_data_needs_no_option(tmp_path: Path) -> None:
    saved = resumable(tmp_path, plan(tmp_path, synthetic=True).origin)
    found = plan(tmp_path, load_checkpoint=saved)
    assert (found.origin.weights.kind, found.origin.data.kind) == ("random", "synthetic")
    assert "starts a new training run" in refusal(tmp_path, load_checkpoint=saved, weights=saved)


def test_imported_weights_may_be_loaded_either_way(tmp_path: Path) -> None:
    imported = prepare_checkpoint(tmp_path / "elsewhere", MAVERICK)
    assert "prepare dataset" in refusal(tmp_path, load_checkpoint=str(imported))
    found = plan(tmp_path, load_checkpoint=str(imported), synthetic=True)
    assert found.origin.weights.kind == "checkpoint"
    assert found.origin.data.kind == "synthetic"


@pytest.mark.parametrize("of_run", [True, False])
def test_adapters_find_their_base_where_it_was_moved(tmp_path: Path, of_run: bool) -> None:
    base = prepare_checkpoint(tmp_path, LORA)
    prepare_dataset(tmp_path, LORA)
    began = plan(tmp_path, LORA)
    source = {} if of_run else {"imported_from": read_checkpoint(base).record.imported_from, "step": 0}
    saved = resumable(tmp_path, began.origin, LORA, lora=began.lora, base=began.origin.weights, **source)
    assert plan(tmp_path, LORA, load_checkpoint=saved).weights == began.weights
    moved = base.rename(tmp_path / "moved")
    said = refusal(tmp_path, LORA, load_checkpoint=saved)
    assert f"the adapters belong to llmb/llama3-tiny in {base}, but there is no such checkpoint" in said
    assert "--weights" in said
    found = plan(tmp_path, LORA, load_checkpoint=saved, weights=str(moved)).weights
    assert found is not None
    assert found.path == str(moved)
    record = json.loads((moved / "checkpoint.json").read_text())
    record["crc32"]["weights/__0_0.distcp"] = "00000000"
    (moved / "checkpoint.json").write_text(json.dumps(record))
    assert "with the identity" in refusal(tmp_path, LORA, load_checkpoint=saved, weights=str(moved))


def test_dropout_of_resumed_adapters_is_refused_where_it_is_unsupported(tmp_path: Path) -> None:
    prepare_checkpoint(tmp_path, LORA)
    prepare_dataset(tmp_path, LORA)
    began = plan(tmp_path, LORA, lora_dropout=0.1)
    saved = resumable(tmp_path, began.origin, LORA, lora=began.lora, base=began.origin.weights)
    assert plan(tmp_path, LORA, load_checkpoint=saved).lora == began.lora
    said = refusal(tmp_path, LORA, load_checkpoint=saved, overrides={"pp": 2})
    assert "dropout 0.1 of the checkpoint's adapters is unsupported with pipeline parallelism" in said

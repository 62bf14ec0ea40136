# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare verify`` of what the reference suite's own preparation leaves in the same folders."""

import json
from pathlib import Path

import pytest
from called_here import Run
from small_suite import NEMO_FILES, write_nemo_checkpoint

from llmb.runs.checkpoints.checkpoint import RECORD
from llmb.runs.checkpoints.prepared_data import PreparedFolders, prepared_folders

MODEL = "meta-llama/Meta-Llama-3-70B"
VERIFY = ("prepare", "verify", "-w", "finetune_llama3", "-s", "70b")


@pytest.fixture
def folders(tmp_path: Path) -> PreparedFolders:
    return prepared_folders(tmp_path / "install", "finetune_llama3")


@pytest.fixture
def install(folders: PreparedFolders, tmp_path: Path) -> Path:
    folders.path.mkdir(parents=True)
    return tmp_path / "install"


def write_nemo_dataset(folders: PreparedFolders, seq_len: int) -> None:
    packed = folders.dataset("squad") / "packed" / MODEL.replace("/", "--")
    packed.mkdir(parents=True)
    for name in ("training.jsonl", "validation.jsonl", "test.jsonl"):
        (folders.dataset("squad") / name).write_text("{}")
    (packed / f"training_{seq_len}.npy").write_bytes(b"x")
    (packed / f"{seq_len}_metadata.jsonl").write_text("[]")


def test_nemos_own_files_are_for_its_scripts_and_not_for_the_engine(llmb: Run, folders: PreparedFolders) -> None:
    write_nemo_checkpoint(folders.model(MODEL))
    write_nemo_dataset(folders, 4096)
    done = llmb(*VERIFY, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["complete"]) == (3, False)
    assert [(item["name"], item["state"]) for item in found["nemo"]] == [
        (f"models/{MODEL}", "complete"),
        ("datasets/squad", "complete"),
    ]
    own = found["items"][0]
    assert (own["state"], "a checkpoint of NeMo" in own["problem"]) == ("missing", True)
    assert f"--source {folders.model(MODEL)}" in own["command"]
    text = llmb(*VERIFY).stdout
    assert "In NeMo's form, for --framework reference_suite" in text


def test_what_an_import_that_was_ended_left_is_named(llmb: Run, folders: PreparedFolders) -> None:
    write_nemo_checkpoint(folders.model(MODEL))
    (folders.model(MODEL) / NEMO_FILES[2]).unlink()
    (folders.model(MODEL) / NEMO_FILES[3]).write_bytes(b"")
    checkpoint, dataset = json.loads(llmb(*VERIFY, "--json").stdout)["nemo"]
    assert checkpoint["state"] == "incomplete"
    assert checkpoint["problem"] == "without weights/common.pt, content in weights/__0_0.distcp: its import was aborted"
    assert (dataset["state"], dataset["problem"]) == ("missing", None)


def test_a_checkpoint_of_llmb_is_not_nemos(llmb: Run, folders: PreparedFolders) -> None:
    folders.model(MODEL).mkdir(parents=True)
    (folders.model(MODEL) / RECORD).write_text("{}")
    checkpoint, _ = json.loads(llmb(*VERIFY, "--json").stdout)["nemo"]
    assert checkpoint["state"] == "of llmb"
    assert "NeMo cannot read" in checkpoint["problem"]

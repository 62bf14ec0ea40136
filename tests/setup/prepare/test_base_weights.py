# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is prepared once, found again, and refused where it is another one; verify says what is missing."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model
from llmb.cli.prepare import app
from llmb.runs.checkpoints.checkpoint import read_checkpoint
from llmb.runs.checkpoints.checkpoint_files import partial_path
from llmb.runs.checkpoints.conversion_request import IMPORTED, FinishedFile
from llmb.runs.checkpoints.prepared_data import PreparedFolders, prepared_folders
from llmb.runs.huggingface.model_config import config_of
from llmb.setup.prepare import base_weights as checkpoint
from llmb.setup.prepare.conversion import export_checkpoint
from llmb.setup.prepare.small_files import MODEL, SAMPLES, write_small_files

pytestmark = pytest.mark.usefixtures("forked_programs")
WORKLOAD = "finetune_llama3"
TINY = ("-w", WORKLOAD, "-s", "tiny")
MODEL_NAME = "llmb/llama3-tiny"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Path:
    """A install root with everything prepared, and the small files in ``small``."""
    root = tmp_path_factory.mktemp("root")
    small = root / "small"
    write_small_files(Catalogue(), WORKLOAD, "tiny", small)
    (small / MODEL / "generation_config.json").write_text("{}")
    environment = {"LLMB_INSTALL": str(root)}
    runner = CliRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked_python)
        for command in (
            ("checkpoint", *TINY, "--source", str(small / MODEL)),
            ("dataset", *TINY, "--source", str(small / SAMPLES)),
        ):
            result = runner.invoke(app, command, env=environment)
            assert result.exit_code == 0, result.output
    return root


@pytest.fixture
def root(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, of the test's own."""
    shutil.copytree(prepared / "workloads", tmp_path / "workloads")
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    return tmp_path


@pytest.fixture
def folders(root: Path) -> PreparedFolders:
    return prepared_folders(root, WORKLOAD)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def verify(*options: str) -> dict[str, Any]:
    result = invoke("verify", *TINY, "--json", *options)
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["complete"] is (result.exception is None)
    return document


def states(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["state"] for item in document["items"]}


def lacking(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["command"] for item in document["items"] if item["command"]}


def test_the_checkpoint_has_weights_and_context_and_names_its_source(prepared: Path, folders: PreparedFolders) -> None:
    checkpoint = read_checkpoint(folders.model(MODEL_NAME))
    assert sorted(path.name for path in checkpoint.path.iterdir()) == ["checkpoint.json", "context", "weights"]
    context = {path.name: path.read_bytes() for path in (checkpoint.path / "context").iterdir()}
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert context == {name: (prepared / "small" / MODEL / name).read_bytes() for name in names}
    record = checkpoint.record
    assert record.imported_from
    assert record.imported_from.path == str(prepared / "small" / MODEL)
    assert (record.workload, record.size, record.optimizer_state) == (WORKLOAD, "tiny", False)
    on_disk = {str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()}
    assert record.files.keys() == on_disk - {"checkpoint.json"}
    assert record.crc32
    assert record.crc32.keys() == record.files.keys()


def test_a_second_call_does_nothing_and_says_so(prepared: Path, root: Path, folders: PreparedFolders) -> None:
    before = {path: path.stat().st_mtime_ns for path in folders.path.rglob("*")}
    for source in ((), ("--source", str(prepared / "small" / MODEL))):
        result = invoke("checkpoint", *TINY, *source, "--json")
        assert result.exit_code == 0
        assert "is already prepared; nothing to do" in result.stderr
        document = json.loads(result.stdout)
        assert (document["made"], document["path"]) == (False, str(folders.model(MODEL_NAME)))
    assert {path: path.stat().st_mtime_ns for path in folders.path.rglob("*")} == before


def test_a_checkpoint_of_something_else_is_refused(root: Path, folders: PreparedFolders, tmp_path: Path) -> None:
    result = invoke("checkpoint", *TINY, "--source", str(tmp_path))
    assert isinstance(result.exception, UsageError)
    assert "the existing checkpoint is prepared from" in str(result.exception)
    record = folders.model(MODEL_NAME) / "checkpoint.json"
    other = json.loads(record.read_text())
    other["model"]["layers"] += 1
    record.write_text(json.dumps(other))
    result = invoke("checkpoint", *TINY)
    assert "of another model: layers is 5 in the checkpoint and 4 in this run" in str(result.exception)
    assert verify()["items"][0]["problem"].startswith("it is another model: layers is 5")


def test_a_damaged_checkpoint_is_not_taken_for_prepared(root: Path, folders: PreparedFolders) -> None:
    next((folders.model(MODEL_NAME) / "weights").glob("*.distcp")).unlink()
    result = invoke("checkpoint", *TINY)
    assert isinstance(result.exception, UsageError)
    assert "weights/__0_0.distcp is missing" in str(result.exception)
    assert "away, and run this command again" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-w", "finetune_llama4-maverick", "-s", "tiny"), "llmb/llama4-maverick-tiny is not on the Hugging Face hub"),
        (("-w", "pretrain_llama3.1", "-s", "tiny"), "pretrain_llama3.1 tiny does not fine-tune"),
        ((*TINY, "--max-file-size", "0"), "'0' is not a size"),
    ],
)
def test_what_cannot_be_prepared_is_refused(root: Path, arguments: tuple[str, ...], said: str) -> None:
    result = invoke("checkpoint", *arguments)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)


def test_a_source_of_another_model_is_refused_and_nothing_is_left(root: Path, folders: PreparedFolders) -> None:
    source = root / "source"
    source.mkdir()
    shutil.rmtree(folders.model(MODEL_NAME))
    (source / "model.safetensors").write_bytes(b"")
    wider = find_model(Catalogue(), WORKLOAD, "tiny").model_copy(update={"ffn_hidden_size": 77})
    (source / "config.json").write_text(json.dumps(config_of(wider, "bf16")))
    result = invoke("checkpoint", *TINY, "--source", str(source))
    assert "intermediate_size is 77" in str(result.exception)
    assert not list(folders.model(MODEL_NAME).parent.iterdir())


def test_a_tokenizer_that_cannot_be_read_is_refused_before_weights_are_converted(
    tmp_path: Path, folders: PreparedFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_files(Catalogue(), WORKLOAD, "tiny", tmp_path / "files")
    shutil.rmtree(folders.model(MODEL_NAME))
    opened = os.open

    def unreadable(path: Path, *arguments: int) -> int:
        if Path(path).name == "tokenizer.json":
            raise PermissionError(13, os.strerror(13), str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", unreadable)
    result = invoke("checkpoint", *TINY, "--source", str(tmp_path / "files" / MODEL), "--processes", "1")
    assert isinstance(result.exception, UsageError)
    assert result.exception.what == "the file cannot be read: Permission denied"
    assert result.exception.where == str(tmp_path / "files" / MODEL / "tokenizer.json")
    assert not list(folders.model(MODEL_NAME).parent.iterdir())


@pytest.mark.parametrize("options", [(), ("--checksums",)])
def test_all_of_the_documents_listing_is_verified(prepared: Path, root: Path, options: tuple[str, ...]) -> None:
    found = verify(*options)
    assert found["checksums"] is bool(options)
    packed = [f"datasets/squad-tiny/packed/llmb--llama3-tiny/{name}_128" for name in ("training", "validation", "test")]
    complete = ["models/llmb/llama3-tiny", "datasets/squad-tiny", *packed]
    assert states(found) == dict.fromkeys(complete, "complete") | dict.fromkeys(("hub", "nemo_nlp_tmp"), "not needed")
    assert found["items"][0]["bytes"] == sum(read_checkpoint(Path(found["items"][0]["path"])).record.files.values())
    assert found["items"][0]["source"] == str(prepared / "small" / MODEL)


def test_what_is_missing_has_the_command_that_gets_it(root: Path, folders: PreparedFolders) -> None:
    shutil.rmtree(folders.model(MODEL_NAME))
    shutil.rmtree(folders.packed("squad-tiny", MODEL_NAME, "test", 128))
    result = invoke("verify", *TINY)
    assert isinstance(result.exception, EnvironmentProblem)
    assert result.exception.do == (
        "llmb prepare checkpoint -w finetune_llama3 -s tiny --source FOLDER\n"
        "         llmb prepare dataset -w finetune_llama3 -s tiny"
    )
    assert "2 of 7 folders are incomplete" in str(result.exception)
    assert states(verify())["models/llmb/llama3-tiny"] == "missing"


def test_sizes_that_differ_are_damage_and_changed_content_only_with_checksums(
    root: Path, folders: PreparedFolders
) -> None:
    tokens = folders.packed("squad-tiny", MODEL_NAME, "training", 128) / "tokens.npy"
    weights = folders.model(MODEL_NAME) / "weights" / "__0_0.distcp"
    for path in (tokens, weights):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert not lacking(verify())
    found = verify("--checksums")
    assert list(lacking(found)) == [
        "models/llmb/llama3-tiny",
        "datasets/squad-tiny/packed/llmb--llama3-tiny/training_128",
    ]
    assert found["items"][0]["problem"].startswith("weights/__0_0.distcp has the checksum")
    tokens.write_bytes(b"")
    assert lacking(verify()) == {
        "datasets/squad-tiny/packed/llmb--llama3-tiny/training_128": (
            f"rm -r {tokens.parent} && llmb prepare dataset -w finetune_llama3 -s tiny --seq-len 128 --split training"
        )
    }


def test_an_import_that_was_interrupted_is_incomplete(root: Path, folders: PreparedFolders) -> None:
    path = folders.model(MODEL_NAME)
    path.rename(partial_path(path))
    weights = partial_path(path) / "weights" / "__0_0.distcp"
    file = FinishedFile(name=weights.name, bytes=weights.stat().st_size, crc32="", places=())
    (partial_path(path) / IMPORTED).mkdir()
    (partial_path(path) / IMPORTED / weights.name).write_text(file.model_dump_json())
    (item,) = [item for item in verify()["items"] if item["command"]]
    assert item["state"] == "incomplete"
    assert item["problem"] == "the import was interrupted; the command resumes it"


@pytest.mark.parametrize(
    ("workload", "size", "documented", "parameters"),
    [(WORKLOAD, "70b", 132, 70_553_706_496), ("finetune_llama4-maverick", "400b", 747, 400_711_848_960)],
)
def test_the_documented_sizes_are_those_of_bf16_in_gib(
    root: Path, workload: str, size: str, documented: float, parameters: int
) -> None:
    result = invoke("verify", "-w", workload, "-s", size, "--json")
    assert isinstance(result.exception, EnvironmentProblem)
    found = json.loads(result.stdout)
    assert found["items"][0]["documented_gib"] == documented
    assert found["needed_bytes"] == 2 * parameters
    assert found["needed_bytes"] / 2**30 == pytest.approx(documented, abs=0.7)
    assert f"llmb prepare checkpoint -w {workload} -s {size}" in str(result.exception)


@pytest.mark.slow
def test_without_a_source_the_model_comes_from_the_hub(
    prepared: Path, folders: PreparedFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folders.model(MODEL_NAME))
    asked: list[tuple[str, str | None, PreparedFolders]] = []

    def fetch(name: str, page: str | None, folders: PreparedFolders, *_: object) -> Path:
        asked.append((name, page, folders))
        return prepared / "small" / MODEL

    monkeypatch.setattr(checkpoint, "fetch_model", fetch)
    result = invoke("checkpoint", *TINY, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["made"] is True
    assert asked == [(MODEL_NAME, None, folders)]


def test_the_disk_is_checked_for_download_and_conversion_before_the_download(
    root: Path, folders: PreparedFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 * 10**9))
    arguments = ("checkpoint", "-w", WORKLOAD, "-s", "70b")
    said = str(invoke(*arguments).exception)
    assert "downloading and converting meta-llama/Meta-Llama-3-70B need about 282 GB; the disk has 200 GB free" in said
    blobs = folders.hub / "models--meta-llama--Meta-Llama-3-70B" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "part").open("wb") as stream:
        stream.truncate(40 * 10**9)  # takes no space
    assert "need about 242 GB" in str(invoke(*arguments).exception)


@pytest.mark.slow
def test_an_export_of_prepared_weights_has_their_tokenizer(prepared: Path, tmp_path: Path) -> None:
    path = prepared_folders(prepared, WORKLOAD).model(MODEL_NAME)
    export_checkpoint(path, tmp_path / "out", "fp32", 10**9, lambda *_: None, lambda _: None, verify=True)
    source = prepared / "small" / MODEL
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", source))
    assert config["eos_token_id"] == before["eos_token_id"] is not None
    assert config["num_hidden_layers"] == 4

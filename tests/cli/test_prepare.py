"""``llmb prepare`` as a user calls it: from a hub that a local server plays, and from small files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from fake_hub import FakeHub, serving
from pyarrow import parquet
from small_tokenizer import rows, save_tokenizer
from typer.testing import CliRunner

from llmb.cli.prepare import app

TOKEN = "hf_" + "x" * 34
MODEL = "meta-llama/Meta-Llama-3-70B"


def squad_on_a_hub(tmp_path: Path) -> FakeHub:
    files = {}
    for split, count in (("train", 120), ("validation", 20)):
        path = tmp_path / split
        parquet.write_table(pyarrow.Table.from_pylist(rows(count)), path)
        files[f"plain_text/{split}-00000-of-00001.parquet"] = path.read_bytes()
    model = save_tokenizer(tmp_path / "model")
    weights = {"model.safetensors": b"not wanted"}
    return FakeHub(
        {
            "datasets/rajpurkar/squad": files,
            MODEL: {**weights, **{file.name: file.read_bytes() for file in model.iterdir()}},
        },
        gated=(MODEL,),
        members=(TOKEN,),
        tokens=(TOKEN,),
    )


def prepare_70b(tmp_path: Path, url: str, token: str | None) -> "subprocess.CompletedProcess[str]":
    own = {"HOME": str(tmp_path), "LLMB_INSTALL": str(tmp_path / "install"), "HF_ENDPOINT": url}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "STAGE_", "LLMB_"))
    }
    command = [sys.executable, "-m", "llmb", "prepare", "dataset", "-w", "finetune_llama3", "-s", "70b", "--json"]
    variables = {**kept, **own, **({"HF_TOKEN": token} if token else {})}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_gated_tokenizer_without_a_token_is_refused_and_what_is_there_is_kept(tmp_path: Path) -> None:
    with serving(squad_on_a_hub(tmp_path)) as hub:
        refused = prepare_70b(tmp_path, hub.url, None)
        assert refused.returncode == 3, refused.stderr
        error = json.loads(refused.stderr.splitlines()[-1])["error"]
        assert error["what"] == f"{MODEL} is gated, but there is no token"
        assert f"https://huggingface.co/{MODEL}" in error["do"]
        hub.requests.clear()
        assert prepare_70b(tmp_path, hub.url, TOKEN).returncode == 0
        assert not [path for _, path in hub.requests if "squad" in path]


def test_squad_and_a_gated_tokenizer_from_the_hub(tmp_path: Path) -> None:
    with serving(squad_on_a_hub(tmp_path)) as hub:
        done = prepare_70b(tmp_path, hub.url, TOKEN)
    assert done.returncode == 0, done.stderr
    assert not [path for _, path in hub.requests if "safetensors" in path]
    document = json.loads(done.stdout)
    assert document["source"].startswith("rajpurkar/squad@0123456789")
    assert document["samples"] == {"training": 114, "validation": 6, "test": 20}
    packed = [(item["split"], item["seq_len"], item["made"]) for item in document["packed"]]
    assert packed == [(split, n, True) for split in ("training", "validation", "test") for n in (2048, 4096)]
    folder = tmp_path / "install" / "workloads" / "finetune_llama3" / "checkpoint_and_dataset"
    assert (folder / "hub" / "datasets--rajpurkar--squad").is_dir()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
    assert TOKEN not in done.stdout + done.stderr


def test_the_commands_that_sample_prints_prepare_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "install"))
    monkeypatch.delenv("STAGE_PATH", raising=False)
    runner = CliRunner()
    made = runner.invoke(app, ["sample", str(tmp_path / "small"), "-w", "finetune_llama3"], catch_exceptions=False)
    assert made.exit_code == 0
    (command,) = [line for line in made.stdout.splitlines() if " prepare dataset " in line]
    arguments = command.split()[2:]
    prepared = runner.invoke(app, arguments, catch_exceptions=False)
    assert "new" in prepared.stdout
    assert "98." in prepared.stdout
    again = runner.invoke(app, ["dataset", "finetune_llama3", "tiny"], catch_exceptions=False)
    assert "everything is already prepared; nothing to do" in again.stderr
    assert "kept" in again.stdout


def test_an_unknown_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    result = CliRunner().invoke(app, ["dataset", "-w", "finetune_llama3_tiny", "--split", "train"])
    assert "unknown split 'train'" in str(result.exception)

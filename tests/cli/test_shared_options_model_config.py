# SPDX-License-Identifier: Apache-2.0
"""--model-config: the commands and functions that take a model from a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from called_here import Run

import llmb as library
from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.runs.folder import RunFolder
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.planning import arguments_of_plan
from llmb.runs.record import read_record

SMALL = config_of(Catalogue().models["qwen3", "tiny"], "bf16")
GPT_OSS: dict[str, Any] = {
    **{key: SMALL[key] for key in ("rms_norm_eps", "hidden_act", "vocab_size", "max_position_embeddings")},
    "model_type": "gpt_oss",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128},
}
H100 = ("--gpu-type", "h100", "--scale", "8")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "Small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def oss(tmp_path: Path) -> Path:
    path = tmp_path / "oss.json"
    path.write_text(json.dumps(GPT_OSS))
    return path


def test_its_recipe_is_shown_with_its_digest_and_without_figures(llmb: Run, small: Path) -> None:
    text = llmb("show", "--model-config", str(small)).stdout
    assert f"no figures are published for the qwen3 model in {small} (sha256 " in text
    assert "none (the model is from a file)" in text
    document = json.loads(llmb("show", "--model-config", str(small), *H100, "--json").stdout)
    assert (document["recipe"]["workload"], document["recipe"]["size"]) == ("pretrain_custom", "small")
    assert document["recipe"]["config_file"]["path"] == str(small)
    assert len(document["recipe"]["config_file"]["sha256"]) == 64
    assert document["expectations"] == []
    assert document["layout"]["gbs"] == 64


@pytest.mark.parametrize(
    "words",
    [
        ("metrics", "--step-time", "3"),
        ("predict",),
        ("plan",),
        ("memory",),
        ("memory", "--estimate"),
        ("show", "--all-scales"),
    ],
)
def test_commands_take_a_model_whose_parts_the_engine_lacks(llmb: Run, oss: Path, words: tuple[str, ...]) -> None:
    scale = H100[:2] if "--all-scales" in words else H100
    done = llmb(*words, "--model-config", str(oss), *scale)
    assert f"the gpt_oss model in {oss}" in done.stdout
    assert ("the memory is estimated" in done.stderr) is (words == ("memory",))


def test_a_run_names_the_parts_that_the_engine_lacks_and_programs_that_have_them(llmb: Run, oss: Path) -> None:
    done = llmb("run", "--model-config", str(oss), *H100, "--dry-run", code=2)
    assert "lacks attention sinks, sliding window, expert biases, clamped GLU, YaRN" in done.stderr
    assert "Megatron-Bridge and torchtitan can train models of type gpt_oss" in done.stderr


def test_a_run_keeps_the_file_and_can_be_repeated_without_it(llmb: Run, small: Path, tmp_path: Path) -> None:
    asked = ("--model-config", str(small), "--gpu-type", "cpu", "--scale", "1", "--layers", "2")
    document = json.loads(llmb("run", *asked, "--steps", "4", "--json").stdout)
    assert document["recipe"]["config_file"]["model_type"] == "qwen3"
    small.unlink()
    plan = read_record(RunFolder(Path(document["run_dir"]))).plan
    words = arguments_of_plan(Catalogue(), plan)  # type: ignore[arg-type]
    assert words[:4] == ["--workload", "pretrain_custom", "--size", "small"]
    assert words[words.index("--model-config") + 1] == str(small)
    assert words[words.index("--layers") + 1] == "2"
    llmb("report", "latest", "-o", str(tmp_path / "page.html"))
    assert "llmb run --model-config " in (tmp_path / "page.html").read_text()
    assert "no figures are published for it" in llmb("judge", "latest", code=None).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-w", "pretrain_qwen3"), "--model-config replaces workload and size, but the workload is 'pretrain_qwen3'"),
        (("-s", "8b"), "but the size is '8b'"),
        (("llama3.1_8b",), "but the workload is 'llama3.1_8b'"),
    ],
)
def test_a_file_and_another_model_exclude_each_other(llmb: Run, small: Path, words: tuple[str, ...], said: str) -> None:
    assert said in llmb("show", "--model-config", str(small), *words, code=2).stderr


def test_its_workload_needs_the_file(llmb: Run, small: Path) -> None:
    for words in (("show", "pretrain_custom", "small"), ("list", "-w", "pretrain_custom")):
        assert "pass the file with --model-config" in llmb(*words, code=2).stderr
    assert "no such option: --model-config" in llmb("submit", "--model-config", str(small), code=2).stderr
    done = llmb("plan", "--model-config", str(small), *H100, "-o", str(small.parent / "campaign.txt"), code=2)
    assert "a campaign cannot contain a model from a file" in done.stderr


def test_functions_take_it_too(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    assert library.recipe(model_config=str(small)).size == "small"
    found = library.predict(model_config=small, scale=8, gpu_type="h100")
    assert found.prediction.plan.recipe.config_file
    assert library.memory(model_config=small, gpu_type="h100", estimate=True).recipe.workload == "pretrain_custom"
    assert library.plan(model_config=small, gpu_type="h100", tp=1, mbs=1).layouts
    with pytest.raises(UsageError, match="the workload is not specified"):
        library.predict(gpu_type="h100")

# SPDX-License-Identifier: Apache-2.0
"""llmb list, show, metrics and run --dry-run, as a user and as a script call them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called_here import Run

SHOW = ("show", "-w", "pretrain_llama3.1", "-s", "8b", "--dtype", "bf16", "--scale", "8", "--gpu-type", "h100")


Document = Callable[..., dict[str, Any]]


@pytest.fixture
def document(llmb: Run) -> Document:
    def read(*arguments: str) -> dict[str, Any]:
        done = llmb(*arguments, "--json", LLMB_INSTALL="")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return read


def test_list_names_every_workload(llmb: Run, document: Document) -> None:
    listed = document("list")["workloads"]
    assert [item["workload"] for item in listed] == [
        "finetune_llama3",
        "finetune_llama4-maverick",
        "pretrain_deepseek-v3",
        "pretrain_gpt_oss",
        "pretrain_kimi-k2",
        "pretrain_llama3.1",
        "pretrain_mixtral",
        "pretrain_nemotron3",
        "pretrain_nemotron4",
        "pretrain_qwen3",
        "sft_llama3",
    ]
    layouts = listed[5]["sizes"]["405b"]["layouts"]
    assert layouts[0]["scales"] == [576, 1152, 2304]
    assert layouts[0]["proxy_scales"] == [32, 96, 192]
    assert "pretrain_nemotron4" not in llmb("list", "-w", "pretrain_llama3.1").stdout


def test_show_keeps_its_contract(document: Document) -> None:
    shown = document(*SHOW)
    assert shown["recipe"] == {
        "workload": "pretrain_llama3.1",
        "size": "8b",
        "dtype": "bf16",
        "gpu_type": "h100",
        "scale": 8,
        "release": "25.04",
        "task": "pretrain",
        "proxy": False,
    }
    assert shown["model"]["parameters"] == 8_030_261_248
    keys = ["gpus", "tp", "pp", "vp", "cp", "ep", "etp", "dp", "mbs", "gbs", "ga", "seq_len", "layers"]
    assert list(shown["layout"]) == keys
    assert [shown["layout"][key] for key in keys] == [8, 1, 1, 1, 2, 1, 1, 4, 1, 128, 32, 8192, 32]
    assert set(shown["flops_per_sequence"]) == {"published", "full", "causal", "packed"}
    assert shown["peak_tflops"] == 989
    (expectation,) = shown["expectations"]
    assert expectation["step_time_s"] == 12.27
    assert expectation["tokens_per_s"] == 85459
    assert expectation["mfu_pct"] == 62.47
    assert (expectation["convention"], expectation["line"], expectation["release"]) == ("full", 54, "25.04")
    assert expectation["window"] == "last"
    assert any("989.5" in note for note in expectation["notes"])


def test_show_tells_a_person_the_same(llmb: Run) -> None:
    text = llmb(*SHOW).stdout
    for said in ("8.03 billion", "DP 4", "GBS 128 GA 32", "12.27", "85,459", "62.47", "line", "989.5"):
        assert said in text


def test_metrics_keeps_its_contract(document: Document) -> None:
    metrics = document("metrics", *SHOW[1:], "--step-time", "12.27")
    assert metrics["tokens_per_s"] == pytest.approx(85459, rel=2e-4)
    assert metrics["tokens_per_s_per_gpu"] == pytest.approx(85459 / 8, rel=2e-4)
    assert metrics["mfu_pct"]["published"] == pytest.approx(62.47, abs=0.06)
    assert metrics["mfu_pct"]["causal"] < metrics["mfu_pct"]["full"]
    assert metrics["days_per_1t_tokens"] == pytest.approx(135.43, abs=0.01)


def test_a_full_disk_under_the_result_is_an_environment_problem() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "llmb.cli.main", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m llmb.cli.main list --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_a_dry_run_prints_the_plan_and_makes_nothing(tmp_path: Path, llmb: Run) -> None:
    options = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "4", "--dry-run")
    done = llmb(*options, "--json")
    planned = json.loads(done.stdout)
    assert planned["plan"]["recipe"]["layout"]["gpus"] == 4
    assert planned["command"][1:6] == ["-P", "-m", "llmb.launch.ranks", "1", "4"]
    assert {"OMP_NUM_THREADS", "PYTHONUNBUFFERED"} <= planned["variables"].keys() | os.environ.keys()
    assert "llmb.launch.ranks" in llmb(*options).stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_specified_is_the_first_line_and_a_field(llmb: Run, document: Document) -> None:
    half = ("show", "-w", "pretrain_llama3.1", "-s", "405b", "--scale", "32", "--dtype", "bf16", "--gpu-type", "h100")
    first, title = llmb(*half).stdout.splitlines()[:2]
    assert first == "not specified: release 25.04 (or 24.11)"
    assert title == "pretrain_llama3.1 405b PROXY (8 of 126 layers) bf16 on 32 x h100"
    shown = document(*half)
    assert shown["unspecified"] == [{"name": "release", "value": "25.04", "origin": "default", "others": ["24.11"]}]
    assert (shown["title"], shown["recipe"]["layers"], shown["recipe"]["full_layers"]) == (title, 8, 126)
    measured = document("metrics", *half[1:], "--step-time", "5.4")
    assert (measured["title"], measured["unspecified"]) == (title, shown["unspecified"])
    assert measured["days_per_1t_tokens"] is None
    assert "proxy" in measured["reasons"]["days_per_1t_tokens"]


def test_a_dry_run_shows_the_layout_the_reference_and_a_command_that_gives_the_same_plan(
    llmb: Run, document: Document
) -> None:
    options = ("run", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8", "--gpu-type", "h100", "--no-compile")
    text = llmb(*options, "--dry-run").stdout
    assert text.startswith("not specified: dtype bf16 (or fp8)\n")
    for said in ("TP 1, PP 1, VP 1, CP 2, EP 1", "12.27 s per step: dgxc", "about 10 min 14 s for 50 steps"):
        assert said in text
    command = text.splitlines()[-1].partition("llmb ")[2].split()
    planned, again = document(*options, "--dry-run"), document(*command, "--dry-run")
    assert again["unspecified"] == []
    same = {"recipe": None, "compiled": False}
    assert planned["plan"] | same == again["plan"] | same
    assert planned["same_run"] == again["same_run"] == f"llmb {' '.join(command)}"

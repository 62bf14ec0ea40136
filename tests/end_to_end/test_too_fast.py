# SPDX-License-Identifier: Apache-2.0
"""Runs with an MFU above 100 %: no GPU has computed so much, whatever the files say."""

import json
from pathlib import Path

import pytest
from called_here import call_llmb
from recorded_runs import gpu_record, times_around, write_run

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.throughput import throughput, why_too_fast
from llmb.launch.programs.conclude import stored_run
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

WHY = "the MFU would be "


@pytest.fixture(autouse=True)
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))


def test_a_run_that_is_too_fast_is_invalid(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path, gpu_record(), times_around(1.55)))
    record = read_record(folder)
    assert record.status == "invalid" and record.result
    assert (record.reason or "").startswith(f"{WHY}440")
    assert (record.result.mfu_pct, record.result.tokens_per_s, record.result.step_time_s.__bool__()) == (
        None,
        None,
        False,
    )
    assert "MFU" not in call_llmb("result", folder.path).stdout.replace(record.reason or "", "")


def test_a_stored_run_that_is_too_fast_is_invalid(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path, gpu_record(), times_around(12.3)))
    assert stored_run(folder, read_record(folder))[0].status == "success"
    text = json.loads(folder.record.read_text())
    text["result"]["mfu_pct"]["published"] = 491.25
    folder.record.write_text(json.dumps(text))
    found = stored_run(folder, read_record(folder))[0]
    assert found.status == "invalid" and "its result has an MFU of 491.2 %" in (found.reason or "")
    (judged,) = call_llmb("judge", folder.path, "--json").document["judged"]
    assert judged["verdict"] == "invalid"


def test_another_window_that_is_too_fast_is_invalid(tmp_path: Path) -> None:
    times = [1.55 if 10 <= step < 20 else seconds for step, seconds in enumerate(times_around(12.3))]
    folder = write_run(tmp_path, gpu_record(), times)
    (judged,) = call_llmb("judge", folder, "--json").document["judged"]
    assert judged["verdict"] == "pass"
    (judged,) = call_llmb("judge", folder, "--window", "10-19", "--json").document["judged"]
    assert judged["verdict"] == "invalid" and WHY in judged["reason"]
    (parsed,) = call_llmb("parse", folder, "--window", "10-19", "--json").document["results"]
    assert (parsed["status"], parsed["mfu_pct"]) == ("invalid", {})


def test_metrics_of_a_step_that_no_gpu_takes_are_refused() -> None:
    words = ("metrics", "-w", "pretrain_llama3.1", "-s", "8b", "--scale", "8", "--gpu-type", "h100", "--dtype", "bf16")
    assert WHY in call_llmb(*words, "--step-time", "1.55").stderr
    assert "62.5" in call_llmb(*words, "--step-time", "12.27").stdout


def test_attention_that_is_masked_may_be_counted_beyond_the_peak() -> None:
    """With long sequences, the full matrix is nearly twice the work that is done."""
    request = Request(
        workload="pretrain_llama3.1", size="8b", scale=8, gpu_type="h100", dtype="bf16",
        overrides=Overrides(seq_len=1 << 20, gbs=8),
    )  # fmt: skip
    recipe = resolve(Catalogue(), request)
    causal = throughput(recipe, 1000.0).tflops_per_gpu["causal"]
    assert causal and recipe.peak_tflops
    found = throughput(recipe, 1000 * causal / (0.7 * recipe.peak_tflops))
    assert found.mfu_pct["causal"] == pytest.approx(70)
    assert found.mfu_pct["full"] is None and "skipped" in found.reasons["mfu_pct.full"]
    assert why_too_fast(found.tflops_per_gpu, found.peak_tflops) is None
    beyond = throughput(recipe, 1000 * causal / (1.01 * recipe.peak_tflops))
    assert set(beyond.mfu_pct.values()) == {None} and beyond.reasons["mfu_pct"].startswith(f"{WHY}101.0 % (causal)")
    assert f"{WHY}100,000.0 % (causal)" in str(why_too_fast({"causal": 989_000.0}, 989.0))

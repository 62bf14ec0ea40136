# SPDX-License-Identifier: Apache-2.0
"""The whole comparison at tiny size, on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.catalogue.load import Catalogue
from llmb.metrics.model_counts import parameter_count

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LLAMA = "llama3.1"
SETTINGS = ("--tiny", "--no-compile", "--steps", "2", "--warmup", "1", "--minutes", "60", "--json")
BROKEN = 'raise RuntimeError("a broken install")\n'
HANGING = "import time\ntime.sleep(3600)\n"


@pytest.fixture(scope="module")
def started(forked_python):
    """Begins a call of the comparison, whose processes need not load torch."""

    def start(*options, python_path=(), **streams):
        paths = os.pathsep.join(map(str, (*python_path, ROOT / "src")))
        environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [forked_python, "-m", "benchmarks.engine", *SETTINGS, *options]
        return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **streams)

    return start


@pytest.fixture(scope="module")
def compare(started):
    """Waits for a call of the comparison."""

    def run(*options, python_path=()):
        with started(*options, python_path=python_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


def put_transformers(folder, content):
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").write_text(content)


def by_case(document):
    return {(case["engine"], case["model"], case["dtype"]): case for case in document["cases"]}


@pytest.fixture(scope="module")
def first(compare, tmp_path_factory):
    """The document of a first call, and where it lies."""
    path = tmp_path_factory.mktemp("comparison") / "out.json"
    done = compare("--out", str(path), "--models", LLAMA)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads(path.read_text()) == document
    return document, path


@pytest.mark.parametrize("model", [LLAMA, pytest.param("nemotron4", marks=pytest.mark.measured)])
def test_every_engine_trained_the_catalogues_model(model, compare, first) -> None:
    document = first[0] if model == LLAMA else json.loads(compare("--models", model).stdout)
    cases, catalogue = by_case(document), Catalogue()
    for engine in ("llmb", "huggingface", "huggingface-fp32"):
        case = cases[engine, model, "bf16"]
        assert case["status"] == "done", case
        assert case["parameters"] == parameter_count(catalogue.models[model, "tiny"])[0]
        assert (case["mbs"], case["ga"], case["seq_len"], case["layers"]) == (1, 2, 128, 4)
        assert len(case["step_times_s"]) == case["step_time_s"]["count"] == 2
        assert case["tokens_per_s"] == pytest.approx(2 * 128 / case["step_time_s"]["median"])
        assert 6 < case["loss"]["first"] < 8, "the loss of random weights is about ln 1024"
        no_peak = {"published": None, "full": None, "causal": None, "packed": None}
        assert case["mfu_pct"] == no_peak, "a CPU has no known peak"
        assert case["peak_memory_gib"] > 0
        assert {"not compiled", "logits kept"} <= set(case["conventions"]) or engine != "llmb"
        assert any("moments in" in line or "and moments" in line for line in case["conventions"])
        assert case["sustained_share_pct"] >= case["kernel_share_pct"] > 0 and case["product_share_pct"] > 0


def test_engines_that_are_not_there_are_not_run_with_a_reason(first) -> None:
    case = by_case(first[0])["megatron-core", LLAMA, "bf16"]
    assert case["status"] == "not_run" and case["step_time_s"] is None
    assert "pip install" in case["reason"]


def test_kernels_are_measured_in_the_same_call(first) -> None:
    ceilings = first[0]["ceilings"]
    assert {(floor["name"], floor["dtype"]) for floor in ceilings["floors"]} == {(LLAMA, "bf16")}
    assert all(floor["products_s"] > 0 and floor["attention_s"] > 0 for floor in ceilings["floors"])
    products = ceilings["measured"]["products"]
    assert {row["training_pass"] for row in products} == {"forward", "input_gradient", "weight_gradient"}
    assert all(row["fastest"] <= row["seconds"] <= row["slowest"] for row in products)
    assert ceilings["measured"]["copy"]["gb_s"] > 0
    assert all(row["seconds"] > 0 and row["dtype"] == "bf16" for row in ceilings["measured"]["sustained"])
    assert all(0 < floor["sustained"] <= 1 for floor in ceilings["floors"])


def test_verdicts_name_what_was_not_measured(first) -> None:
    verdicts = [verdict for verdict in first[0]["verdicts"] if verdict["model"] == LLAMA]
    found = {verdict["against"]: verdict for verdict in verdicts}
    assert found["published MFU"]["verdict"] == "not_measured"
    assert found["tokens/s of huggingface"]["verdict"] in ("reached", "not_reached")
    assert "not installed" in found["tokens/s of megatron-core"]["reason"]


@pytest.mark.measured
def test_a_second_call_keeps_what_is_done_and_records_a_crash(compare, first, tmp_path) -> None:
    """transformers is there, but cannot be imported; Maverick and fp8 are new."""
    document, path = first
    put_transformers(tmp_path, BROKEN)
    done = compare(
        "--out", str(path), "--models", "llama3.1,maverick", "--dtypes", "bf16,fp8", "--engines", "huggingface,llmb",
        "--no-ceilings",
        python_path=(tmp_path,),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "huggingface llama3.1 bf16, 2 micro-batches: reused" in done.stderr
    before, after = by_case(document), by_case(json.loads(done.stdout))
    for key, case in before.items():
        if case["status"] == "done":
            assert after[key] == case
    crashed = after["huggingface", "maverick", "bf16"]
    assert (crashed["status"], crashed["reason"]) == ("failed", "RuntimeError: a broken install")
    assert "Traceback" in crashed["log_tail"]
    trained = after["llmb", "maverick", "bf16"]
    assert trained["status"] == "done", "a crash of one engine does not end the others"
    assert trained["tflops"]["packed"] is None, "sequences are one document each, as those of the other engines"
    for model in (LLAMA, "maverick"):
        case = after["llmb", model, "fp8"]
        assert case["status"] == "done", case
        assert 6 < case["loss"]["first"] < 8


@pytest.mark.measured
def test_a_call_that_is_killed_is_resumed(started, compare, tmp_path) -> None:
    """Results are kept in a file of their own; the document is written anew, and complete after each case.

    The second case of the first call hangs, so that it is killed in that one however fast or busy the machine is.
    """
    options = ("--models", LLAMA, "--engines", "huggingface,llmb", "--no-ceilings")
    out = tmp_path / "first.json"
    put_transformers(tmp_path, HANGING)
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = started(*options, "--out", str(out), python_path=(tmp_path,), **silent)
    while not (out.exists() and json.loads(out.read_text())["cases"]):
        assert process.poll() is None
        time.sleep(0.05)
    second = compare(*options, "--out", str(out))
    assert second.returncode == 2 and "another process has been writing this file" in second.stderr
    process.kill()
    process.wait()
    (kept,) = json.loads(out.read_text())["cases"]
    assert kept["status"] == "done"
    refused = compare(*options, "--steps", "3", "--resume", str(out))
    assert refused.returncode == 2 and "steps 2 -> 3" in refused.stderr
    again = tmp_path / "second.json"
    done = compare(*options, "--resume", str(out), "--out", str(again))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("reused") == 1
    cases = json.loads(again.read_text())["cases"]
    assert kept in cases and [case["status"] for case in cases] == ["done", "done"]
    assert json.loads(again.read_text())["verdicts"]


def test_a_profile_breaks_a_step_down(compare) -> None:
    done = compare("--groups", "profile", "--dtypes", "bf16", "--no-ceilings")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert (case["variant"], len(case["step_times_s"])) == ("profile", 2)
    assert case["breakdown"]["matrix_product_s"] > 0


def test_what_does_not_fit_is_listed(compare) -> None:
    done = compare("--models", LLAMA, "--no-ceilings", "--engines", "huggingface", "--minutes", "0.01")
    (case,) = json.loads(done.stdout)["cases"]
    assert done.returncode == 4
    assert case["status"] == "not_run" and case["reason"].startswith("budget: ")


@pytest.mark.gpu
def test_one_proxy_on_a_gpu(needs, tmp_path) -> None:
    import torch

    needs("gpu", torch.cuda.is_available(), "no CUDA device")
    command = [sys.executable, "-m", "benchmarks.engine", "--groups", "first", "--dtypes", "bf16", "--engines",
               "llmb", "--steps", "2", "--json"]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    document = json.loads(subprocess.check_output(command, cwd=ROOT, env=environ, text=True))
    (case,) = document["cases"]
    assert case["status"] == "done", case
    assert 0 < case["kernel_share_pct"] <= 105


def test_a_step_of_each_engine_is_timed_in_turn():
    command = [sys.executable, "-m", "benchmarks.engine.pairs", "--quick", "--json", "--engines=huggingface"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["turns"], found["tokens_per_step"]) == (3, 256)
    own, other = found["engines"]
    assert (own["engine"], own["beside_llmb"], other["engine"]) == ("llmb", 1.0, "huggingface")
    assert min(own["quartile_ms"], other["quartile_ms"], other["beside_llmb"]) > 0

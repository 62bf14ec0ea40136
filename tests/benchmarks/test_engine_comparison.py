# SPDX-License-Identifier: Apache-2.0
"""The whole comparison at tiny size, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.throughput import parameter_count

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LLAMA = "llama3.1"
SETTINGS = ("--tiny", "--no-compile", "--steps", "2", "--warmup", "1", "--minutes", "60", "--json")


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
def test_a_profile_breaks_a_step_down(compare) -> None:
    done = compare("--groups", "profile", "--dtypes", "bf16", "--no-ceilings")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    assert (case["variant"], len(case["step_times_s"])) == ("profile", 2)
    assert case["breakdown"]["matrix_product_s"] > 0


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


@pytest.mark.measured
def test_a_step_of_each_engine_is_timed_in_turn():
    command = [sys.executable, "-m", "benchmarks.engine.pairs", "--quick", "--json", "--engines=huggingface"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["turns"], found["tokens_per_step"]) == (3, 256)
    own, other = found["engines"]
    assert (own["engine"], own["beside_llmb"], other["engine"]) == ("llmb", 1.0, "huggingface")
    assert min(own["quartile_ms"], other["quartile_ms"], other["beside_llmb"]) > 0

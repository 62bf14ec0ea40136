# SPDX-License-Identifier: Apache-2.0
"""The guard of generated code finds what it has to, and the engine's layers stay within their bounds."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.generated_code.bounds import exceeded, read_bounds
from benchmarks.generated_code.records import DENSE_MODELS, Block, Case, Document, Memory, Pass
from benchmarks.generated_code.tables import tables

from llmb.catalogue.records import Dtype

ROOT = Path(__file__).parents[2]
PASS_BYTES = 4096 * 2048 * 2
CAST_BYTES = PASS_BYTES // 2
TORCH = importlib.metadata.version("torch").split("+")[0]

generates = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not TORCH.startswith("2.13"),
    reason="needs triton and torch 2.13, whose code the bounds are of: make setup",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def recorded():
    done = run(str(Path(__file__).with_name("generated_worker.py")))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@generates
def test_a_pass_over_memory_is_counted_once(recorded):
    assert recorded["one_pass"] == {
        "bytes": 2 * PASS_BYTES, "kernels": 1, "uncoalesced": [], "shapes": [[4096, 2048]]
    }  # fmt: skip


@generates
def test_an_extra_pass_shows(recorded):
    assert recorded["extra_pass"]["bytes"] == 3 * PASS_BYTES


@generates
def test_a_slice_counts_what_is_read_of_it(recorded):
    assert recorded["slice_of_larger"]["bytes"] == 2 * PASS_BYTES // 4


@generates
def test_a_transposed_store_of_single_bytes_is_found_and_counted(recorded):
    plain, transposed = recorded["row_by_row"], recorded["row_by_row_transposed"]
    assert plain["uncoalesced"] == []
    assert transposed["uncoalesced"] == [["store", CAST_BYTES]]
    assert transposed["bytes"] - plain["bytes"] == CAST_BYTES


def case(model="8b", *, u=10.0, stores=0.0, copies=0.0, per_parameter=30.0) -> Case:
    one = Pass(u=u, kernels=3, products=7, attentions=1, uncoalesced_stores=stores, uncoalesced_loads=0, list=())
    return Case(
        model=model,
        dtype=Dtype.FP8,
        hidden_state_bytes=2,
        block=Block(forward=one, backward=one),
        bytes_per_parameter=per_parameter,
        bytes_per_parameter_by={},
        accumulation_bytes_per_parameter=6.0,
        uncoalesced_copies=copies,
        memory=Memory(gpu_type="h200", layers=2, parameters=10, peak_gb=1.0, by_gb={}),
    )


def document(*cases: Case) -> Document:
    return Document(torch="2.13.0", triton="3.7.1", cases=cases)


BOUNDS = """
bounds:
  8b:
    fp8: {u: 20, uncoalesced_stores: 0, uncoalesced_loads: 0, uncoalesced_copies: 0, bytes_per_parameter: 32}
"""


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (case(), []),
        (case("70b", u=99), []),
        (case(u=10.1), ["8b fp8 on h200: u is 20.20, allowed 20"]),
        (case(stores=0.5), ["8b fp8 on h200: uncoalesced_stores is 1.00, allowed 0"]),
        (case(copies=7), ["8b fp8 on h200: uncoalesced_copies is 7.00, allowed 0"]),
        (case(per_parameter=60), ["8b fp8 on h200: bytes_per_parameter is 60.00, allowed 32"]),
    ],
)
def test_what_exceeds_its_bound_is_named(tmp_path, found, named):
    path = tmp_path / "bounds.yaml"
    path.write_text(BOUNDS)
    assert exceeded(document(found), read_bounds(path)) == named


def test_every_model_and_dtype_of_the_comparison_has_bounds():
    bounds = read_bounds()
    assert {(model, dtype) for model in DENSE_MODELS for dtype in (Dtype.BF16, Dtype.FP8)} <= {
        (model, dtype) for model, of in bounds.items() for dtype in of
    }


def test_a_table_has_both_figures_where_they_differ():
    shown = tables(document(case(u=11)), document(case(u=10)), kernels=False)
    assert "| 10.0 > 11.0 | 10.0 > 11.0 | 20.0 > 22.0 | 0 | 0 | 0 | 6 |" in shown


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        # One that has everything; it takes 15 s of processor time.
        ("tiny-llama3.1", "fp8"),
        pytest.param("tiny-llama3.1", "bf16", marks=pytest.mark.slow),
        pytest.param("tiny-nemotron4", "bf16", marks=pytest.mark.slow),
        pytest.param("tiny-nemotron4", "fp8", marks=pytest.mark.slow),
        pytest.param("8b", "bf16", marks=pytest.mark.slow),
        pytest.param("8b", "fp8", marks=pytest.mark.slow),
    ],
)
@generates
def test_the_engine_stays_within_the_bounds(model, dtype):
    done = run("-m", "benchmarks.generated_code", "--models", model, "--dtypes", dtype, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = Document.model_validate_json(done.stdout).cases
    assert read_bounds()[model][Dtype(dtype)].u >= found.block.u > 0
    assert found.block.total("products") > 0
    assert found.bytes_per_parameter > 16


@pytest.mark.parametrize("arguments", [("--models", "7b"), ("--dtypes", "fp4"), ("--gpus", "a100")])
def test_an_unknown_choice_is_an_error(arguments):
    done = run("-m", "benchmarks.generated_code", *arguments)
    assert done.returncode == 2
    assert f"unknown {arguments[1]}; known: " in done.stderr


def test_without_triton_the_command_says_what_to_install():
    program = "runpy.run_module('benchmarks.generated_code', run_name='__main__')"
    done = run("-c", f"import runpy, sys; sys.modules['triton'] = None; {program}")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no triton" in done.stderr and "pip install" in done.stderr

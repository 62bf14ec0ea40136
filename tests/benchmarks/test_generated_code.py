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
from benchmarks.generated_code.bounds import FIELDS, exceeded, read_bounds
from benchmarks.generated_code.options import read_options
from benchmarks.generated_code.records import MODELS, TINY_MODELS, Block, Case, Document, Memory, Pass
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


@pytest.mark.slow
@generates
def test_a_pass_over_memory_is_counted_once_and_a_slice_by_its_size(recorded):
    assert recorded["one_pass"] == {
        "bytes": 2 * PASS_BYTES, "kernels": 1, "repeated": 0, "in_flight": 0, "uncoalesced": [],
        "shapes": [[4096, 2048]],
    }  # fmt: skip
    assert recorded["extra_pass"]["bytes"] == 3 * PASS_BYTES
    assert recorded["slice_of_larger"]["bytes"] == 2 * PASS_BYTES // 4
    assert recorded["symbolic"] == {"shape": ["int", "int"], "rows": 4096}


@pytest.mark.slow
@generates
def test_a_transposed_store_of_single_bytes_is_found_and_counted(recorded):
    plain, transposed = recorded["row_by_row"], recorded["row_by_row_transposed"]
    assert plain["uncoalesced"] == []
    assert transposed["uncoalesced"] == [["store", CAST_BYTES]]
    assert transposed["bytes"] - plain["bytes"] == CAST_BYTES


@pytest.mark.slow
@generates
def test_rows_that_two_generated_loops_read_are_apart(recorded):
    assert recorded["normalized"]["bytes"] == 2 * PASS_BYTES
    assert recorded["normalized"]["repeated"] == PASS_BYTES
    # Four programs of 512 threads on each of 132 multiprocessors, with a row each.
    assert recorded["normalized"]["in_flight"] == 4 * 132 * 2048 * 2
    # A sum that a later loop reads comes from the cache.
    assert recorded["sum_normalized"]["bytes"] == 3 * PASS_BYTES
    assert recorded["sum_normalized"]["repeated"] == PASS_BYTES
    assert recorded["beyond_the_cache"] == {"u": [3, 5], "cached_u": [2, 0]}


@pytest.mark.slow
@generates
@pytest.mark.parametrize(
    ("kernel", "read_or_written", "repeated", "rows_in_flight"),
    [("read_twice", 2, 1, 132 * 16), ("written_and_read", 2, 1, 132 * 8), ("unrolled", 2, 0, 0)],
)
def test_rows_that_two_loops_of_a_kernel_read_are_apart(recorded, kernel, read_or_written, repeated, rows_in_flight):
    assert recorded[kernel] == {
        "bytes": read_or_written * PASS_BYTES,
        "repeated": repeated * PASS_BYTES,
        "in_flight": rows_in_flight * 2048 * 2,
    }


@pytest.mark.slow
@generates
def test_what_a_kernel_reads_of_new_memory_it_has_written(recorded):
    own, earlier = recorded["own_sums"], recorded["earlier_sums"]
    sums = 132 * 2048 * 4
    assert (own["kernels"], own["bytes"], own["repeated"]) == (1, PASS_BYTES + sums, sums)
    assert (earlier["kernels"], earlier["bytes"], earlier["repeated"]) == (2, 2 * PASS_BYTES + 3 * sums, sums)


@pytest.mark.slow
@generates
def test_of_what_is_rotated_in_place_that_part_is_counted_and_nothing_is_copied(recorded):
    rotated, table = 2 * PASS_BYTES // 4, PASS_BYTES // 64
    tables = 2 * (table + 2 * 2 * table)  # read in bf16, written and read in fp32
    assert recorded["rotated_in_place"]["kernels"] == 4
    assert recorded["rotated_in_place"]["bytes"] == 2 * PASS_BYTES + rotated + tables


def case(model="8b", *, u=10.0, stores=0.0, copies=0.0, per_parameter=30.0, with_experts=()) -> Case:
    one = Pass(u=u, kernels=3, products=7, attentions=1, uncoalesced_stores=stores, uncoalesced_loads=0, list=())
    return Case(
        model=model,
        dtype=Dtype.FP8,
        hidden_state_bytes=2,
        blocks=(Block(layers="dense", forward=one, backward=one), *with_experts),
        bytes_per_parameter=per_parameter,
        bytes_per_parameter_by={},
        accumulation_bytes_per_parameter=6.0,
        uncoalesced_copies=copies,
        memory=Memory(gpu_type="h200", layers=2, parameters=10, peak_gb=1.0, by_gb={}),
    )


def experts(*, u=10.0, stores=0.0) -> Block:
    one = Pass(u=u, kernels=3, products=7, attentions=1, uncoalesced_stores=stores, uncoalesced_loads=0, list=())
    return Block(layers="experts", forward=one, backward=one, routed_u=17)


def document(*cases: Case) -> Document:
    return Document(torch="2.13.0", triton="3.7.1", cases=cases)


BOUNDS = """
bounds:
  8b:
    fp8:
      {u: 20, experts_u: 30, uncoalesced_stores: 0, uncoalesced_loads: 0, uncoalesced_copies: 0,
       bytes_per_parameter: 32}
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
        (case(with_experts=(experts(u=15.5),)), ["8b fp8 on h200: experts_u is 31.00, allowed 30"]),
        (case(with_experts=(experts(stores=1),)), ["8b fp8 on h200: uncoalesced_stores is 2.00, allowed 0"]),
    ],
)
def test_what_exceeds_its_bound_is_named(tmp_path, found, named):
    path = tmp_path / "bounds.yaml"
    path.write_text(BOUNDS)
    assert exceeded(document(found), read_bounds(path)) == named


def test_every_model_and_dtype_of_the_comparison_has_bounds():
    bounds = read_bounds()
    assert {(model, dtype) for model in MODELS for dtype in (Dtype.BF16, Dtype.FP8)} <= {
        (model, dtype) for model, of in bounds.items() for dtype in of
    }


def test_a_table_has_both_figures_where_they_differ():
    shown = tables(document(case(u=11)), document(case(u=10)), kernels=False)
    assert "| 8b fp8 | 10.0 > 11.0 | 10.0 > 11.0 | 20.0 > 22.0 | 0.0 | 0 | 0 | 6 | 14 | 0 | 30.0 |" in shown

    shown = tables(document(case(with_experts=(experts(u=12),))), document(case()), kernels=False)
    assert "| 8b fp8, dense | 10.0 | 10.0 | 20.0 | 0.0 | 0 | 0 | 6 | 14 | 0 | 30.0 |" in shown
    assert "| 8b fp8, experts | 12.0 | 12.0 | 24.0 | 0.0 | 0 | 0 | 6 | 14 |  |  |" in shown
    assert "8b fp8: 17.0 u of a layer with experts" in shown


@pytest.mark.parametrize(
    ("model", "dtype", "ranks"),
    [
        # One has everything, with an exchange between ranks too; each takes 15 s of processor time.
        pytest.param(model, dtype, n, marks=[pytest.mark.measured] * ((model, dtype, n) != ("tiny-llama3.1", "fp8", 8)))
        for model in ("tiny-llama3.1", "tiny-nemotron4", "tiny-maverick", "8b")
        for dtype in ("bf16", "fp8")
        for n in (1, 8)
    ],
)
@generates
@pytest.mark.slow
def test_the_engine_stays_within_the_bounds(model, dtype, ranks):
    """Those of one GPU, which are within 5 % of its figures, hold for each of several, too."""
    command = ("-m", "benchmarks.generated_code", "--models", model, "--dtypes", dtype, "--ranks", str(ranks), "--json")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    (found,) = Document.model_validate_json(done.stdout).cases
    assert [block.layers for block in found.blocks] == ["dense", "experts"][: 1 + (model == "tiny-maverick")]
    for block in found.blocks:
        assert getattr(read_bounds()[model][Dtype(dtype)], FIELDS[block.layers]) >= block.u > 0
        assert block.total("products") > 0
    assert found.bytes_per_parameter > 16


@generates
@pytest.mark.measured
def test_routed_experts_in_fp8_move_their_rows_as_often_as_documented():
    """Of Maverick: two casts of rows, and those with SwiGLU, of features and of gate and up that are 1.6 as wide."""
    done = run("-m", "benchmarks.generated_code", "--models", "maverick", "--dtypes", "fp8", "--json")
    (found,) = Document.model_validate_json(done.stdout).cases
    dense, block = found.blocks
    assert (dense.layers, block.layers) == ("dense", "experts")
    assert block.routed_u == pytest.approx(2 + 1.6 * 3 + 2 + 1.6 * 5, abs=0.1)
    # The router has one more, and each expert and matrix; two gradients of each.
    assert block.total("products") - dense.total("products") == 3 * (1 + 4 * 2)


@generates
@pytest.mark.measured
@pytest.mark.parametrize("model", TINY_MODELS)
def test_generated_kernels_and_those_of_the_engine_in_them_are_assembled(model):
    """For both compute capabilities; 30 s of processor time."""
    done = run(str(Path(__file__).with_name("assembled_worker.py")), model, "fp8")
    assert done.returncode == 0, done.stderr
    hopper, blackwell = json.loads(done.stdout).values()
    assert hopper == blackwell
    assert {"cast_kernel", "cast_rotated_kernel", "normalize_and_cast_kernel", "normalize_backward_kernel"} <= {*hopper}
    assert any(name.startswith("triton_") for name in hopper)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--models", "7b"), "--models: unknown 7b; known: 8b, "),
        (("--dtypes", "fp4"), "--dtypes: unknown fp4; known: bf16, fp8"),
        (("--ranks", "0"), "--ranks is 0, but there is at least one"),
        (("--gpus", "a100"), "--gpus: unknown a100; known: h200, h100"),
        (("--models", "8b,70b,8b"), "--models repeats 8b: name each once"),
        (("--dtypes", "fp8", "--dtypes", "bf16"), "--dtypes is repeated: separate"),
        (("--against", "MISSING"), "--against MISSING: No such file or directory; make one with --json > FILE"),
        (("--against", "."), "--against .: Is a directory; make one with"),
        (("--against", "README.md"), "--against README.md: not a document of this version (Invalid JSON: "),
        (("--against", "package.json"), "--against package.json: not a document of this version (torch: Field "),
        (("--json", "--against", "package.json"), "--json and --against: "),
    ],
)
def test_a_wrong_choice_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "README.md").write_text("# Words")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        read_options(arguments)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_options_have_defaults_and_read_a_document(tmp_path):
    before = document(case())
    (tmp_path / "before.json").write_text(before.model_dump_json())
    options = read_options(["--dtypes", "fp8", "--against", str(tmp_path / "before.json")])
    assert (options.models, options.dtypes, options.gpus) == (MODELS, ("fp8",), ("h200",))
    assert options.before == before


WRITES = "from benchmarks.generated_code.__main__ import write; write(''); write('x' * 100000)"


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">&-", 2, "cannot write to standard output: it is closed; redirect it"),
        (">/dev/full", 2, "cannot write to standard output: No space left on device; redirect it"),
        ("| head -c 1", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(redirected, code, said):
    if redirected == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("no full device")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    shell = ["bash", "-o", "pipefail", "-c", f'{sys.executable} -c "{WRITES}" {redirected}']
    done = subprocess.run(shell, env=environ, capture_output=True, text=True)
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert [said in line for line in lines] == ([True] if said else [])


def test_without_triton_the_command_says_what_to_install():
    program = "runpy.run_module('benchmarks.generated_code', run_name='__main__')"
    done = run("-c", f"import runpy, sys; sys.modules['triton'] = None; {program}")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no triton" in done.stderr and "pip install" in done.stderr

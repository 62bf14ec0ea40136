# SPDX-License-Identifier: Apache-2.0
"""The benchmark of kernels counts what they move; how fast they are is for a GPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import fused_kernels
from benchmarks.fused_kernels import Measured, cases, measure

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.kernels import elementwise
from llmb.engine.kernels.elementwise import has_kernel

COMMAND = [sys.executable, "-m", "benchmarks.fused_kernels"]
ROOT = Path(__file__).parents[2]
ROWS = 64


@pytest.mark.parametrize("name", ["llama3.1", "nemotron4"])
def test_every_tensor_is_counted_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over memory in bytes per element of the hidden state, or of the activation's result."""
    monkeypatch.setattr(fused_kernels, "kernels_of", lambda _function: elementwise)
    model = resolve(Catalogue(), Request(workload=f"pretrain_{name}", size="tiny", gpu_type="cpu")).model
    found = [measure("8b", case, lambda _call: 2.0) for case in cases(model, ROWS, torch.device("cpu"))]
    hidden, features = ROWS * model.hidden_size, ROWS * model.ffn_hidden_size
    of_query, of_key = (ROWS * model.head_dim * number for number in (model.attention_heads, model.kv_heads))
    elements = [hidden] + [features] * 2 + [of_query + 2 * of_key]
    gated = name == "llama3.1"
    # Read and written, in bf16 and twice in FP8.
    expected = [2 + 2, *((4 + 2, 6 + 4) if gated else (2 + 2, 4 + 2)), 2 + 2]
    # Weights, their gradients, numbers of rows and tables of positions are few.
    assert [one.bytes // count for one, count in zip(found, elements, strict=True)] == expected
    assert all(one.of_copy == one.of_compiled == 1 for one in found)


def test_the_table_fits_80_columns() -> None:
    widest = Measured("405b", "squared-relu backward, cast", 2_600_000_000, 0.0012, 0.0012, 0.06)
    lines = [*fused_kernels.header("NVIDIA H200").splitlines(), fused_kernels.line(widest)]
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[-5:] == ["2600", "1200.0", "2167", "1.00", "50.00"]


def test_the_torch_code_is_that_of_one_module() -> None:
    with fused_kernels.without_kernels(elementwise):
        assert elementwise.has_kernel is not has_kernel
    assert elementwise.has_kernel is has_kernel


@pytest.mark.gpu
def test_every_kernel_is_measured(needs: Callable[[str, bool, str], None]) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    done = subprocess.run([*COMMAND, "--rows", "512", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, fused_kernels.SLOWER), done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    assert all(min(one["kernel_s"], one["copy_s"], one["compiled_s"]) > 0 for one in found)

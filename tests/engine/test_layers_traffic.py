# SPDX-License-Identifier: Apache-2.0
"""What a layer's compiled code for a GPU reads and writes between its products: no change adds a pass unseen."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("layer_traffic_worker.py")
PASSES = {
    ("pretrain_llama3.1", "fp8"): 71.0,
    ("pretrain_llama3.1", "bf16"): 61.2,
    ("pretrain_nemotron4", "fp8"): 63.0,
    ("pretrain_nemotron4", "bf16"): 53.1,
}
"""Bytes of the forward and the backward pass over those of the hidden state."""


@pytest.mark.measured
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not importlib.metadata.version("torch").startswith("2.13"),
    reason="needs triton and torch 2.13, whose code this is of: make setup",
)
@pytest.mark.parametrize("case", PASSES)
def test_a_layer_moves_as_many_bytes_as_before(case: tuple[str, str]) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(WORKER), *case], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(PASSES[case], abs=0.2)

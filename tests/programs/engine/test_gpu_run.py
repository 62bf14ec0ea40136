# SPDX-License-Identifier: Apache-2.0
"""A run on a GPU. The catalogue's type does not matter here, only that the very same command trains on CUDA."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tiny_model_trains_on_one_gpu(tmp_path: Path, needs: Callable[..., None], dtype: str) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    options = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "h100", "--scale", "1", "--dtype", dtype)
    command = [sys.executable, "-m", "llmb.cli.main", "run", *options, "--steps", "20", "--json"]
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loss"]["first"] == pytest.approx(math.log(1024), abs=0.2)
    assert result["loss"]["last"] < result["loss"]["first"] - 0.5
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["plan"]["device"] == "cuda"
    assert record["environment"]["backend"] == "nccl"
    assert record["environment"]["device_memory_gib"] > 0

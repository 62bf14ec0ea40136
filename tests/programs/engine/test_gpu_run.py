# SPDX-License-Identifier: Apache-2.0
"""A run on a GPU. The catalogue's type does not matter here, only that the very same command trains on CUDA."""

import importlib.util
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


def test_a_run_tells_the_energy_of_a_token(tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    needs("pynvml", importlib.util.find_spec("pynvml") is not None, "nvidia-ml-py is not installed")
    options = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "h100", "--scale", "1", "--steps", "200")
    command = [sys.executable, "-m", "llmb.cli.main", "run", *options, "--resource-interval", "0.02", "--json"]
    environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["resources_reason"] is None
    use = result["resources"]
    assert len(use["gpus"]) == 1
    assert 20 < use["power_w_mean"] <= use["power_w_max"] < 3000
    assert use["energy_j_per_token"] > 0
    power_w = use["energy_j_per_token"] * result["tokens_per_s"]
    assert power_w == pytest.approx(use["total_power_w_mean"], rel=0.2)
    assert use["memory_used_gib_max"] > result["peak_memory_gib"]

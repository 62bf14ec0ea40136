# SPDX-License-Identifier: Apache-2.0
"""Runs on a GPU. The catalogue's type does not matter here, only that the very same command trains on CUDA."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LLMB = (sys.executable, "-m", "llmb.cli.main")
OPTIONS = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "h100", "--scale", "1")
OnGpu = Callable[..., dict[str, Any]]


def said(*command: str, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [*LLMB, *command, "--json"], env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def on_gpu(tmp_path: Path, needs: Callable[..., None]) -> OnGpu:
    """The result of a run with these options."""
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    return lambda *options: said("run", *OPTIONS, *options, LLMB_INSTALL=str(tmp_path))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tiny_model_trains_on_one_gpu(on_gpu: OnGpu, dtype: str) -> None:
    result = on_gpu("--dtype", dtype, "--steps", "20")
    assert result["loss"]["first"] == pytest.approx(math.log(1024), abs=0.2)
    assert result["loss"]["last"] < result["loss"]["first"] - 0.5
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["plan"]["device"] == "cuda"
    assert record["environment"]["backend"] == "nccl"
    assert record["environment"]["device_memory_gib"] > 0


def test_a_run_tells_the_energy_of_a_token(on_gpu: OnGpu, needs: Callable[..., None]) -> None:
    needs("pynvml", importlib.util.find_spec("pynvml") is not None, "nvidia-ml-py is not installed")
    result = on_gpu("--steps", "200", "--resource-interval", "0.02")
    assert result["resources_reason"] is None
    use = result["resources"]
    assert len(use["gpus"]) == 1
    assert 20 < use["power_w_mean"] <= use["power_w_max"] < 3000
    assert use["energy_j_per_token"] > 0
    power_w = use["energy_j_per_token"] * result["tokens_per_s"]
    assert power_w == pytest.approx(use["total_power_w_mean"], rel=0.2)
    assert use["memory_used_gib_max"] > result["peak_memory_gib"]


def assert_broken_down(profile: dict[str, Any]) -> None:
    assert profile["warnings"] == []
    step = profile["breakdown"]
    assert step["matrix_product_s"] > 0
    assert step["unclassified_s"] == 0
    parts = ("attention", "matrix_product", "other", "memory_copy", "communication_exposed", "idle")
    assert sum(step[f"{part}_s"] for part in parts) == pytest.approx(step["duration_s"], rel=1e-6)


def test_the_pytorch_profiler_sees_kernels(on_gpu: OnGpu) -> None:
    result = on_gpu("--dtype", "bf16", "--steps", "20", "--profile", "--profiler", "torch")
    assert_broken_down(result["profile"])
    assert said("trace", result["run_dir"])["ranks"][0]["device"] == "gpu"


def test_nsight_systems_leaves_a_report(on_gpu: OnGpu, needs: Callable[..., None]) -> None:
    needs("nsys", shutil.which("nsys") is not None, "Nsight Systems (nsys) is not on the PATH")
    profile = on_gpu("--dtype", "bf16", "--steps", "20", "--profile", "--profiler", "nsys")["profile"]
    assert profile["files"] == ["nsys_profile/profile_0.nsys-rep"]
    assert_broken_down(profile)


def test_nccl_logs_what_a_run_does_beside_its_steps(on_gpu: OnGpu) -> None:
    """A rank alone exchanges nothing in a step."""
    result = on_gpu("--dtype", "bf16", "--nccl-trace")
    assert (result["steps"], result["step_time_s"]) == (5, None)
    log = said("nccl", result["run_dir"])["log"]
    assert (log["steps"], log["calls"] > 0) == ([], True)

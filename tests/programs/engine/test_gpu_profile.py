# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of profiling: kernels in the traces, Nsight Systems itself, and NCCL's log."""

import json
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
OPTIONS = ("-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "h100", "--scale", "1", "--dtype", "bf16")


@pytest.fixture
def on_gpu(tmp_path: Path, needs: Callable[..., None]) -> Callable[..., dict[str, Any]]:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")

    def run(*options: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "llmb.cli.main", "run", *OPTIONS, *options, "--json"]
        environ = {**os.environ, "LLMB_INSTALL": str(tmp_path)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def check(result: dict[str, Any]) -> None:
    assert result["profile"]["warnings"] == []
    step = result["profile"]["breakdown"]
    assert step["matrix_product_s"] > 0
    parts = ("attention", "matrix_product", "other", "memory_copy", "communication_exposed", "idle")
    assert sum(step[f"{part}_s"] for part in parts) == pytest.approx(step["duration_s"], rel=1e-6)


def test_the_pytorch_profiler_sees_kernels(on_gpu: Callable[..., dict[str, Any]]) -> None:
    result = on_gpu("--steps", "20", "--profile", "--profiler", "torch")
    check(result)
    command = [sys.executable, "-m", "llmb.cli.main", "trace", result["run_dir"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ranks"][0]["device"] == "gpu"


def test_nsight_systems_leaves_a_report(on_gpu: Callable[..., dict[str, Any]], needs: Callable[..., None]) -> None:
    needs("gpu", shutil.which("nsys") is not None, "Nsight Systems (nsys) is not on the PATH")
    result = on_gpu("--steps", "20", "--profile", "--profiler", "nsys")
    assert result["profile"]["files"] == ["nsys_profile/profile_0.nsys-rep"]
    check(result)


def test_nccl_logs_each_step(on_gpu: Callable[..., dict[str, Any]]) -> None:
    result = on_gpu("--nccl-trace")
    assert (result["steps"], result["step_time_s"]) == (5, None)
    command = [sys.executable, "-m", "llmb.cli.main", "nccl", result["run_dir"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    log = json.loads(done.stdout)["log"]
    assert [step["step"] for step in log["steps"]] == [0, 1, 2, 3, 4]
    assert log["steps"][1]["calls"] == log["steps"][2]["calls"] > 0

# SPDX-License-Identifier: Apache-2.0
"""Complete runs of ``llmb run`` on GPUs go through all of their stages; only what computes is pretended.

What no run on a CPU does: a process that is bound to a GPU makes its groups, copies batches from pinned memory, reads
figures of steps late, times by events, exchanges figures by way of the host, and generates kernels.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from pretended_gpus import DRIVER, LOSS, NAME, NORM, PEAK_BYTES, pretended

STEPS = 3
LOADED = ("triton.backends.compiler", "torch._inductor.fx_passes.fuse_attention")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not importlib.metadata.version("torch").startswith("2.13"),
        reason="needs triton and torch 2.13, whose parts are pretended: make setup",
    ),
]
SMALL = ("--layers", "2", "--gbs", "4")
LLAMA = ("pretrain_llama3.1", "tiny", *SMALL)
MAVERICK = ("finetune_llama4-maverick", "tiny", "--synthetic", *SMALL)
BALANCED = "--force-load-balancing"  # the host waits for no number of the device's
PIPELINE = ("--pp", "2", "--no-compile")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "bf16": (1, LLAMA),
    "fp8": (1, (*LLAMA, "--dtype", "fp8")),
    "fp8-current": (1, (*LLAMA[:2], "--dtype", "fp8", "--fp8-recipe", "current")),
    "recomputed": (1, (*LLAMA, "--recompute", "selective")),
    "lora-packed": (1, ("finetune_llama3", "tiny", "--synthetic")),
    "experts": (1, (*MAVERICK, BALANCED)),
    "experts-fp8": (1, (*MAVERICK, BALANCED, "--dtype", "fp8")),
    "sharded": (2, (*LLAMA, "--dtype", "fp8")),
    "tensor-parallel": (2, (*LLAMA, "--tp", "2", "--no-compile")),
    "tensor-parallel, compiled": (2, (*LLAMA, "--tp", "2")),
    "context-parallel": (2, (*LLAMA, "--cp", "2")),
    "pipeline, profiled": (2, (*LLAMA, *PIPELINE, "--profile", "--profiler", "torch", "--checkpoint-interval", "2")),
    "expert-parallel-fp8": (2, (*MAVERICK, BALANCED, "--ep", "2", "--dtype", "fp8")),
}

# What the others do too: stages of the pipeline exchange what they compute, and "fp8" generates kernels.
FURTHER = RUNS.keys() - {"fp8", "pipeline, profiled"}


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """What is called like the interpreter, and need not load torch and its compiler."""
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer(Path(folder), *LOADED)
        yield str(server.python)
        server.stop()


def run(python: str, folder: Path, gpus: int, *arguments: str, steps: int = STEPS) -> Path:
    """The run's folder."""
    environ = os.environ | pretended(gpus, folder / "bin") | {"LLMB_INSTALL": str(folder / "install")}
    words = ("run", *arguments, "--steps", str(steps), "--window", "all", "--json")
    done = subprocess.run([python, "-m", "llmb.__main__", *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "install" / "latest").resolve()


@pytest.fixture(scope="module")
def run_of(python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of ``RUNS``."""
    return cache(lambda name: run(python, tmp_path_factory.mktemp("pretended"), RUNS[name][0], *RUNS[name][1]))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.measured) if name in FURTHER else name for name in RUNS]
)
def test_a_run_goes_through_all_stages(name: str, run_of: Callable[[str], Path]) -> None:
    gpus, folder = RUNS[name][0], run_of(name)
    record = json.loads((folder / "run.json").read_text())
    found = record["environment"]
    assert (found["backend"], found["device"], found["driver"]) == ("nccl", NAME, DRIVER)
    assert [gpu["uuid"] for gpu in found["gpus"]] == [f"GPU-{gpu:08d}" for gpu in range(gpus)]
    assert found["ptxas"].count(".") == 2
    kernels = {each["kernel"] for each in found["kernels"]}
    assert ("cast_both_ways" in kernels) == (record["plan"]["fp8_recipe"] is not None)
    assert ("cast_rotated_gradient" in kernels) == (record["plan"]["fp8_recipe"] == "delayed")
    assert all((each["rank"], each["right"]) == (0, True) for each in found["kernels"])
    assert found["gpus"] == found["gpus_at_end"]
    left = {"rank": 0, "free_gib": found["device_memory_gib"] - PEAK_BYTES / 2**30 - 2, "outside_gib": 2}
    assert found["device_memory"] == record["result"]["device_memory"] == left
    assert found["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    done = steps_of(folder)
    assert [step["step"] for step in done] == list(range(STEPS))
    for step in done:
        assert (step["loss"], step["grad_norm"], step["peak_memory_bytes"]) == (LOSS, NORM, PEAK_BYTES)
        assert 0 < step["layer_s_median"] < step["step_time_s"]
        assert step["host_ahead_s"] is not None
    assert record["result"]["status"] == "success"


@pytest.mark.measured
def test_a_run_with_a_wrong_kernel_ends_before_it_trains(python: str, tmp_path: Path) -> None:
    environ = os.environ | pretended(1, tmp_path / "bin") | {"LLMB_INSTALL": str(tmp_path), "LLMB_TEST_DIFFERENCE": "7"}
    words = ("run", *LLAMA, "--dtype", "fp8", "--steps", "2", "--json")
    done = subprocess.run([python, "-m", "llmb.__main__", *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 4
    folder = (tmp_path / "latest").resolve()
    (log,) = folder.glob("log-*.out")
    assert "cast_both_ways, 128x128, on rank 0: 7 times the error that rounding explains" in log.read_text()
    assert not (folder / "metrics.jsonl").exists()
    record = json.loads((folder / "run.json").read_text())
    assert {each["right"] for each in record["environment"]["kernels"]} == {False}
    assert record["result"]["status"] == "failed"
    assert "kernels compute wrong results at the shapes of this run" in record["result"]["reason"]


def test_a_rank_runs_alone(python: str, tmp_path: Path) -> None:
    """Of eight, on one GPU."""
    folder = run(
        python, tmp_path, 1, *LLAMA, "--pretend-scale", "8", "--tp", "2", "--pp", "2", "--rank", "5", "--no-compile"
    )
    assert [(step["loss"], step["peak_memory_rank"]) for step in steps_of(folder)] == [(None, 5)] * STEPS
    record = json.loads((folder / "run.json").read_text())
    assert [gpu["uuid"] for gpu in record["environment"]["gpus"]] == ["GPU-00000000"]
    own = record["result"]["pretended"]
    assert (own["pp_stage"], own["peak_memory_gib"]) == (1, PEAK_BYTES / 2**30)
    assert own["compute_time_s"]["count"] == STEPS


@pytest.mark.measured
def test_a_run_resumes_from_a_checkpoint(python: str, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    (saved,) = run_of("pipeline, profiled").glob(f"checkpoints/step={STEPS}-*")
    resumed = run(python, tmp_path, 2, *LLAMA, *PIPELINE, "--load-checkpoint", str(saved), steps=1)
    assert [step["step"] for step in steps_of(resumed)] == [STEPS]

# SPDX-License-Identifier: Apache-2.0
"""However a run ends, it ends soon, says why, and keeps its log."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log

Start = Callable[..., Any]
Gone = Callable[..., bool]
ENDS_WITHIN_S = 300
LLAMA = ("-w", "pretrain_llama3.1", "--scale", "2")
SOON_S = 120
"""Far less than what hangs would take."""


def test_a_finished_run_keeps_everything_that_decided_it(start: Start, tmp_path: Path, forked_python: str) -> None:
    run = start(*LLAMA, "--steps", "10", "--json", python=forked_python)
    out, talk = run.process.communicate()
    ended = time.time()
    assert run.process.returncode == 0, talk
    result = json.loads(out)
    assert result["status"] == "success"
    assert ended - (Path(result["run_dir"]) / "metrics.jsonl").stat().st_mtime < SOON_S
    assert result["window"] == {"first": 7, "last": 8, "rule": "reference"}
    assert set(result["step_time_s"]) >= {"mean", "median", "std", "cv", "ci95"}
    assert result["tokens_per_s"] == pytest.approx(8 * 128 / result["step_time_s"]["mean"])
    assert result["tflops_per_gpu"]["full"] > result["tflops_per_gpu"]["causal"] > 0
    assert result["mfu_pct"] == {"published": None, "full": None, "causal": None, "packed": None}
    assert result["loss"]["last"] < result["loss"]["first"]
    assert 0.05 < result["peak_memory_gib"] < 4
    assert result["verdict"] is None
    folder = Path(result["run_dir"])
    name = "pretrain_llama3.1_tiny_fp32_gpus2_tp1_pp1_cp1_vp1_ep1_mbs1_gbs8"
    assert folder.relative_to(tmp_path).parts[:4] == ("workloads", "pretrain_llama3.1", "experiments", name)
    assert folder.name == name
    kept = run.record()
    assert kept["status"] == "success"
    assert kept["exit_code"] == 0
    assert kept["plan"]["recipe"]["layout"]["gbs"] == 8
    assert kept["plan"]["seed"] == 1234
    assert kept["environment"]["torch"]
    assert kept["environment"]["backend"] == "gloo_one_thread"
    assert kept["environment"]["nodes"] == [os.uname().nodename]
    settings = kept["settings"]
    assert (settings["nodes"], settings["unlike"]) == ([os.uname().nodename], {})
    assert settings["usual"]["kernel.release"] == os.uname().release
    assert kept["result"]["tokens_per_s"] == result["tokens_per_s"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "job.json",
        "job_spec.json",
        f"log-{name}.out",
        "metrics.jsonl",
        "rank_times.jsonl",
        "resources",
        "run.json",
    ]
    log = (folder / f"log-{name}.out").read_text().splitlines()
    lines = [line for line in log if line.startswith("Training epoch 0, iteration ")]
    assert [line.split()[4] for line in lines] == [f"{step}/9" for step in range(10)]
    assert "consumed_samples: 80" in lines[-1]


def test_a_loss_that_is_not_finite_ends_the_run_as_invalid(start: Start, forked_python: str) -> None:
    run = start(*LLAMA, "--lr", "1e38", "--save-checkpoint", "--json", python=forked_python)
    out, talk = run.process.communicate()
    assert run.process.returncode == 6
    assert "the run is invalid: step" in talk
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["status"] == "invalid"
    assert result["steps"] < 50
    assert result["step_time_s"] is None
    folder = Path(result["run_dir"])
    assert run.record()["status"] == "invalid"
    assert not (folder / "checkpoints").exists()
    with (folder / f"log-{folder.name}.out").open("rb") as log:
        outcome = judge_log(read_log(log, "reference"))
    assert outcome.status == "invalid"
    assert "gradient norm" in outcome.reason


@pytest.mark.parametrize(
    "how",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.measured) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_an_interrupted_run_leaves_no_process_behind(
    start: Start, gone: Gone, forked_python: str, how: signal.Signals
) -> None:
    run = start(*LLAMA, "--steps", "100000", python=forked_python)
    folder = run.wait_for_steps(3)
    workers = run.workers()
    began = time.monotonic()
    run.process.send_signal(how)
    run.process.send_signal(how)  # an impatient second time changes nothing
    _, talk = run.process.communicate()
    assert time.monotonic() - began < SOON_S
    assert run.process.returncode == 130
    assert f"interrupted by {how.name} after" in talk
    assert gone(list(workers.values()))
    assert run.record()["status"] == "cancelled"
    assert (folder / "metrics.jsonl").read_text().count("\n") >= 3


@pytest.mark.parametrize("size", ["4k", pytest.param("64k", marks=pytest.mark.measured)])
@pytest.mark.slow
def test_a_full_disk_is_named_and_nothing_hangs(
    start: Start, tmp_path: Path, small_disk: Callable[[str], list[str]], size: str
) -> None:
    """4k has no room for the record, 64k none for a hundred thousand steps."""
    run = start(*LLAMA, "--steps", "100000", install=tmp_path / "disk", prefix=small_disk(size))
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode in (3, 4)
    assert "No space left on device" in talk
    assert "LLMB_INSTALL" in talk


@pytest.mark.measured
def test_a_run_where_the_host_name_is_unknown(start: Start, needs: Callable[[str, bool, str], None]) -> None:
    """As in some containers and on some laptops."""
    alone = ("unshare", "--uts", "--map-root-user")
    probe = subprocess.run([*alone, "true"], capture_output=True, check=False)
    needs("mount", probe.returncode == 0, "unshare (util-linux) must be allowed to give a process another host name")
    renamed = (*alone, "sh", "-c", 'hostname nowhere-at-all; exec "$@"', "sh")
    run = start(*LLAMA, "--steps", "3", "--window", "1-2", "--seq-len", "32", prefix=renamed)
    shown, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 0, talk
    assert "step time s, mean" in shown


def test_a_disk_that_must_not_be_written_is_named(
    start: Start, tmp_path: Path, small_disk: Callable[[str], list[str]]
) -> None:
    run = start(*LLAMA, install=tmp_path / "disk", prefix=small_disk("1m,ro"))
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 3
    assert "Read-only file system" in talk
    assert str(tmp_path / "disk") in talk
    assert "Traceback" not in talk

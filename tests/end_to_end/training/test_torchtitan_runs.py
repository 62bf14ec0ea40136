# SPDX-License-Identifier: Apache-2.0
"""Runs of torchtitan itself on CPUs; what is replaced there is in llmb.launch.programs.torchtitan.on_cpu."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llmb.launch.programs.conclude import read_ended_run
from llmb.runs.folder import RunFolder

Start = Callable[..., Any]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: llmb[torchtitan]"),
]
TITAN = ("--framework", "torchtitan")
LLAMA = ("-w", "pretrain_llama3.1", *TITAN)
QWEN = ("-w", "pretrain_qwen3", *TITAN)
GPT_OSS = ("-w", "pretrain_gpt_oss", *TITAN)
DEEPSEEK = ("-w", "pretrain_deepseek-v3", *TITAN)
PRINTED = re.compile(
    r"step: +(\d+)  loss: +([\d.]+)  grad_norm: +[\d.]+  memory: +[^ ]+  tps: ([\d,]+)  tflops: ([\d.]+)"
)
STARTED_WITHIN_S = 300


FAMILIES = [
    (*LLAMA, "--scale", "2", "--pp", "2", "--recompute", "full", "--profile", "--profile-start-step", "8"),
    (*QWEN, "-s", "tiny-moe", "--scale", "2", "--ep", "2"),
    (*GPT_OSS, "--scale", "1"),
    (*DEEPSEEK, "--scale", "1", "--dtype", "bf16"),
]
FURTHER = [
    (*LLAMA, "--scale", "1"),
    (*LLAMA, "--scale", "2", "--dtype", "bf16"),
    (*LLAMA, "--scale", "2", "--tp", "2"),
    (*LLAMA, "--scale", "1", "--dtype", "fp8", "--emulate-fp8"),
    (*QWEN, "--scale", "2", "--dp-sharding", "none"),
    (*QWEN, "-s", "tiny-moe", "--scale", "4", "--tp", "2", "--ep", "2"),
    (*GPT_OSS, "--scale", "4", "--tp", "2", "--ep", "2", "--force-load-balancing"),
    (*DEEPSEEK, "--scale", "2", "--pp", "2", "--recompute", "selective"),
    (*DEEPSEEK, "--scale", "4", "--tp", "2", "--ep", "2", "--dtype", "bf16"),
]


@pytest.mark.parametrize(
    "options", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.measured) for each in FURTHER)], ids=" ".join
)
def test_ten_steps_are_trained_and_recorded(start: Start, options: tuple[str, ...]) -> None:
    run = start(*options, "--steps", "10", "--window", "3-9", "--json")
    out, talk = run.process.communicate()
    assert run.process.returncode == 0, talk
    result, record = json.loads(out), run.record()
    folder = Path(result["run_dir"])
    printed = PRINTED.findall((folder / f"log-{folder.name}.out").read_text())
    assert [int(step) for step, *_ in printed] == list(range(1, 11)), "one rank logs"
    assert result["loss"] == {"first": float(printed[0][1]), "last": float(printed[-1][1])}
    assert result["loss"]["last"] < result["loss"]["first"] - 0.3
    # torchtitan's own figures, of which it prints whole tokens/s and two digits of TFLOPS.
    ranks = record["plan"]["recipe"]["layout"]["gpus"]
    profiled = "--profile" in options
    rates = [float(rate.replace(",", "")) for _, _, rate, _ in printed[2 : 8 if profiled else 9]]
    seconds = [8 * 128 / ranks / rate for rate in rates]
    assert result["step_time_s"]["mean"] == pytest.approx(sum(seconds) / len(seconds), rel=0.02)
    assert result["tflops_per_gpu"]["full"] == pytest.approx(float(printed[5][3]), abs=0.02)
    assert record["program"] == "torchtitan"
    assert record["environment"]["packages"]["torchtitan"] == version("torchtitan")
    assert record["environment"]["torch"] == version("torch")
    assert record["environment"]["ranks_per_node"] == {os.uname().nodename: ranks}
    ended = read_ended_run(RunFolder(folder))
    assert ended.result.status == "success"
    trace = ended.result.profile
    assert (trace is not None) == profiled
    if trace is not None:
        assert len(trace.files) == ranks and not trace.warnings
        assert trace.breakdown is not None and trace.breakdown.step in (8, 9)
        assert trace.breakdown.collectives and trace.breakdown.matrix_product_s > 0
    assert ended.result.verdict is None or not ended.result.verdict


def wait_for_steps(run: Any, count: int) -> None:
    end = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < end:
        if any(len(PRINTED.findall(path.read_text())) >= count for path in run.install.rglob("log-*.out")):
            return
        assert run.process.poll() is None, run.process.communicate()
        time.sleep(0.2)
    raise AssertionError("the run did not start")


@pytest.mark.measured
def test_an_interrupted_run_is_cancelled(start: Start, gone: Callable[..., bool]) -> None:
    run = start(*GPT_OSS, "--scale", "2", "--steps", "100000")
    wait_for_steps(run, 3)
    workers = run.workers()
    run.process.send_signal(signal.SIGINT)
    _, talk = run.process.communicate()
    assert run.process.returncode == 130
    assert "ended by SIGINT" in talk
    assert gone(list(workers.values()))
    assert run.record()["status"] == "cancelled"


def test_a_killed_rank_ends_the_run_and_is_named(start: Start, gone: Callable[..., bool]) -> None:
    run = start(*DEEPSEEK, "--scale", "2", "--steps", "100000")
    wait_for_steps(run, 3)
    workers = run.workers()
    os.kill(workers[1], signal.SIGKILL)
    _, talk = run.process.communicate()
    assert run.process.returncode not in (0, 130)
    assert gone(list(workers.values()))
    record = run.record()
    assert record["status"] == "failed"
    assert record["reason"].startswith(f"rank 1 on {os.uname().nodename} was killed by signal 9"), talk


def test_an_argument_that_it_does_not_have_is_named(start: Start) -> None:
    run = start(*LLAMA, "--scale", "1", "--framework-arg", "compile.bakend=eager")
    _, talk = run.process.communicate()
    assert run.process.returncode not in (0, 130)
    assert "Unrecognized options: --compile.bakend=eager" in talk
    assert run.record()["status"] == "failed"

# SPDX-License-Identifier: Apache-2.0
"""Slowed runs are slow: every step lasts at least as long as what was added to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slowed_runs import Slow, slowed

DELAY_S = 0.4
RUN = ("-m", "llmb.cli.main", "run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1")


def steps_of(python: str, install: Path, *what: Slow) -> list[dict[str, float]]:
    environ = {**os.environ, "LLMB_INSTALL": str(install), **slowed(*what)}
    subprocess.run([python, *RUN, "--steps", "3"], env=environ, check=True, capture_output=True)
    (path,) = install.rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_what_is_forked_is_slowed(tmp_path: Path, forked_python: str) -> None:
    steps = steps_of(forked_python, tmp_path, Slow("step", ms=1000 * DELAY_S))
    assert [step["step_time_s"] >= DELAY_S for step in steps] == [True] * 3


@pytest.mark.slow
def test_what_the_interpreter_starts_is_slowed(tmp_path: Path) -> None:
    steps = steps_of(sys.executable, tmp_path, Slow("compute", ms=1000 * DELAY_S), Slow("step", pct=50, rank=7))
    assert [step["step_time_s"] >= DELAY_S for step in steps] == [True] * 3


@pytest.mark.slow
def test_a_slow_loader_is_waited_for(tmp_path: Path, forked_python: str) -> None:
    """In one step at least: a pause in a step hides the wait of the next one."""
    steps = steps_of(forked_python, tmp_path, Slow("loader", ms=4000 * DELAY_S))
    assert max(step["data_wait_s"] for step in steps) >= DELAY_S

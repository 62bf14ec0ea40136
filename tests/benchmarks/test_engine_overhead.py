# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the engine's overhead runs and says what it measured; how much that is, is not for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_overhead.py"


@pytest.mark.measured
def test_the_overhead_is_measured_in_pairs() -> None:
    command = [sys.executable, SCRIPT, "--quick", "--json"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["overhead_pct"] < found["target_pct"] else 1)
    assert found["pairs"] == 4
    assert found["tokens_per_step"] == 64
    for loop in ("engine", "bare"):
        times = found[loop]
        assert 0 < times["min_s"] <= times["median_s"] <= times["max_s"]
        assert times["cpu_s"] > 0
    step = found["cpu_pct"] if found["judged_by"] == "cpu time" else found["step_pct"]
    assert found["overhead_pct"] == pytest.approx(step + found["watch_pct"])

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sampling runs and says what it measured; how much that is, is not for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "resource_sampling.py"


@pytest.mark.measured
def test_the_cost_is_measured_in_pairs() -> None:
    command = [sys.executable, SCRIPT, "--quick", "--json"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode in (0, 1)
    assert (found["pairs"], found["steps_per_block"]) == (3, 2)
    assert found["sampler_pct"] > 0 and found["sampled_s"] > 0
    for kind in ("cpu_time", "wall_time"):
        more, (low, high) = found[kind]
        assert low < more < high

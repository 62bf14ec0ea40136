# SPDX-License-Identifier: Apache-2.0
"""The benchmark of FP8 on CPUs trains in both precisions; how long they take is not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fp8_on_cpu.py"


@pytest.mark.measured
def test_one_comparison_runs() -> None:
    command = [sys.executable, SCRIPT, "--quick", "--workload", "pretrain_llama3.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    found = json.loads(done.stdout)
    assert (found["workload"], found["limit"]) == ("pretrain_llama3.1", "this CPU")
    assert min(found["bf16_s"], found["fp8_s"], found["ratio"]) > 0

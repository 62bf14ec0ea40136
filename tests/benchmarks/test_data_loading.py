# SPDX-License-Identifier: Apache-2.0
"""The benchmark of data loading trains with and without the loader; how long that takes is not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_loading.py"


@pytest.mark.measured
def test_both_sides_run() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick", "--json"], capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert (found["documents"], found["seq_len"], found["steps"]) == (500, 1024, 2)
    assert min(found["micro_batch_ms"], found["premade_s"], found["loader_s"], found["ratio"]) > 0

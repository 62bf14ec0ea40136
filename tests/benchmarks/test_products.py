# SPDX-License-Identifier: Apache-2.0
"""The benchmark of matrix products computes both sides of every shape; how long they take is not for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "products.py"


@pytest.mark.measured
def test_every_shape_is_compared() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick", "--json"], capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert len({one["case"] for one in found}) == len(found) == 2 * 16, (
        "5 weights in 3 passes, and a square, in 2 dtypes"
    )
    assert all(min(one["plain_s"], one["llmb_s"], one["ratio"]) > 0 for one in found)

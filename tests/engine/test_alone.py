# SPDX-License-Identifier: Apache-2.0
"""What stands in for other ranks has values, so that kernels compute with numbers as they do in a run."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest


def test_collectives_of_a_rank_that_is_alone_give_its_own_values(run_ranks: Callable[..., list[str]]) -> None:
    (printed,) = run_ranks(Path(__file__).parent / "alone_worker.py", 1)
    found = json.loads(printed)
    received = found.pop("received")
    assert statistics.fmean(received) == pytest.approx(0, abs=0.2)
    assert statistics.stdev(received) == pytest.approx(1, abs=0.2)
    gathered = [1.0, 2.0] * 4
    assert found == {
        "votes": [1],
        "gathered in place": gathered,
        "gathered apart": gathered,
        "gathered": gathered,
        "exchanged": [0.0, 1.0, 2.0, 3.0],
        "more received": [0.0, 1.0, 2.0, 3.0, 0.0],
        "fewer received": [0.0, 1.0, 2.0],
        "scattered": [2.0, 3.0],
        "reduced": [1.0, 2.0],
    }

# SPDX-License-Identifier: Apache-2.0
"""Whole runs, from the options to the steps' figures: however they are computed, they train the same.

``engine/test_layouts.py`` has every layout.
"""

from collections.abc import Callable
from typing import Any

import pytest

Losses = Callable[..., list[dict[str, Any]]]


LLAMA = ("-w", "pretrain_llama3.1")
TWO = ("--scale", "2", "--steps", "10", "--checkpoint-interval", "5")  # the run that test_checkpoints.py needs


@pytest.mark.slow
def test_two_and_four_processes_reproduce_one(losses: Losses) -> None:
    one, four = (losses(*LLAMA, "--scale", scale, "--steps", "10") for scale in ("1", "4"))
    two = losses(*LLAMA, *TWO)
    assert len(one) == 10
    for other in (two, four):
        for single, several in zip(one, other, strict=True):
            assert abs(single["loss"] - several["loss"]) <= 1e-6, single["step"]
            assert several["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)
            assert several["lr"] == single["lr"]
            assert several["tokens"] == single["tokens"]
            assert {several["slowest_rank"], several["peak_memory_rank"]} <= set(range(4))
            assert several["rank_step_time_s_min"] <= several["rank_step_time_s_max"]
    assert one[-1]["loss"] < one[0]["loss"] - 0.5


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(losses: Losses) -> None:
    first, other = losses(*LLAMA, *TWO), losses(*LLAMA, "--scale", "2", "--steps", "2", "--seed", "7")
    again = losses(*LLAMA, "--scale", "2", "--steps", "5", "--seed", "1234")
    deterministic = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[step[key] for key in deterministic] for step in first[:5]] == [
        [step[key] for key in deterministic] for step in again
    ]
    assert [step["loss"] for step in first[:2]] != [step["loss"] for step in other]


@pytest.mark.slow
def test_how_a_step_is_computed_does_not_change_its_loss(losses: Losses) -> None:
    """Four sequences are enough for logits to be cut into pieces."""
    changed = losses(*LLAMA, "--steps", "5", "--scale", "2", "--mbs", "4", "--recompute", "selective")
    for plain, other in zip(losses(*LLAMA, *TWO)[:5], changed, strict=True):
        assert abs(plain["loss"] - other["loss"]) <= 1e-6


@pytest.mark.slow
def test_bf16_follows_fp32_closely_but_not_exactly(losses: Losses) -> None:
    """Master weights stay in fp32: updates of 3e-4 would vanish in bf16 weights of 0.02 and more."""
    exact, rounded = losses(*LLAMA, *TWO)[:4], losses(*LLAMA, "--scale", "2", "--steps", "4", "--dtype", "bf16")
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(exact, rounded, strict=True)]
    assert 0 < max(differences) < 0.03 < exact[0]["loss"] - exact[-1]["loss"]

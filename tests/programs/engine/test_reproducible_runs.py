# SPDX-License-Identifier: Apache-2.0
"""Real training by several processes: the number of processes never changes the result."""

from collections.abc import Callable
from typing import Any

import pytest

Losses = Callable[..., list[dict[str, Any]]]


LLAMA = ("-w", "pretrain_llama3.1")
TWO = ("--scale", "2", "--steps", "20")


@pytest.mark.parametrize(
    "chosen",
    [
        LLAMA,
        pytest.param(("-w", "pretrain_nemotron4"), marks=pytest.mark.measured),
        # Which tokens an expert drops at its capacity is decided by rounding.
        pytest.param(("-w", "finetune_llama4-maverick", "--capacity-factor", "0"), marks=pytest.mark.measured),
    ],
)
def test_two_and_four_processes_reproduce_one(losses: Losses, chosen: tuple[str, ...]) -> None:
    one, two, four = (losses(*chosen, "--scale", scale, "--steps", "20") for scale in ("1", "2", "4"))
    assert len(one) == 20
    for other in (two, four):
        for single, several in zip(one, other, strict=True):
            assert abs(single["loss"] - several["loss"]) <= 1e-6, single["step"]
            assert several["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)
            assert several["lr"] == single["lr"]
            assert several["tokens"] == single["tokens"]
    assert one[-1]["loss"] < one[0]["loss"] - 0.5


def test_the_same_seed_gives_the_same_run_and_another_seed_another(losses: Losses) -> None:
    first, other = losses(*LLAMA, *TWO), losses(*LLAMA, "--scale", "2", "--steps", "5", "--seed", "7")
    again = losses(*LLAMA, *TWO, "--seed", "1234")
    deterministic = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[step[key] for key in deterministic] for step in first] == [
        [step[key] for key in deterministic] for step in again
    ]
    assert [step["loss"] for step in first[:5]] != [step["loss"] for step in other]


@pytest.mark.parametrize(
    "options",
    [
        ("--recompute", "selective"),
        ("--mbs", "4"),  # enough for logits to be cut into pieces
        pytest.param(("--recompute", "full"), marks=pytest.mark.measured),
        pytest.param(("--mbs", "4", "--keep-logits"), marks=pytest.mark.measured),
    ],
)
def test_how_a_step_is_computed_does_not_change_its_loss(losses: Losses, options: tuple[str, ...]) -> None:
    changed = losses(*LLAMA, "--scale", "2", "--steps", "5", *options)
    for plain, other in zip(losses(*LLAMA, *TWO)[:5], changed, strict=True):
        assert abs(plain["loss"] - other["loss"]) <= 1e-6


@pytest.mark.slow
def test_bf16_follows_fp32_closely_but_not_exactly(losses: Losses) -> None:
    """Master weights stay in fp32: updates of 3e-4 would vanish in bf16 weights of 0.02 and more."""
    rounded = losses(*LLAMA, *TWO, "--dtype", "bf16")
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(losses(*LLAMA, *TWO), rounded, strict=True)]
    assert 0 < max(differences) < 0.03

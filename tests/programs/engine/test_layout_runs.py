# SPDX-License-Identifier: Apache-2.0
"""Whole runs in a few layouts, from the options to the steps' figures; ``engine/test_layouts.py`` has every layout."""

from collections.abc import Callable
from typing import Any

import pytest

Losses = Callable[..., list[dict[str, Any]]]
EVERY_TOKEN = {"finetune_llama4-maverick": ("--capacity-factor", "0")}
"""Which tokens an expert drops at its capacity is decided by rounding."""


def assert_same_training(losses: Losses, workload: str, *options: str, steps: int) -> list[dict[str, Any]]:
    chosen = ("-w", workload, *EVERY_TOKEN.get(workload, ()))
    one = losses(*chosen, "--scale", "1", "--steps", "20")[:steps]
    several = losses(*chosen, *options, "--steps", str(steps))
    for single, other in zip(one, several, strict=True):
        assert abs(single["loss"] - other["loss"]) <= 1e-5, single["step"]
        assert other["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)
        assert other["tokens"] == single["tokens"]
    return several


@pytest.mark.measured
def test_tensor_and_context_parallel_reproduce_one_process_with_recomputation(losses: Losses) -> None:
    options = ("--scale", "4", "--mbs", "4", "--tp", "2", "--cp", "2", "--recompute", "full")
    steps = assert_same_training(losses, "pretrain_llama3.1", *options, steps=6)
    assert {step["slowest_rank"] for step in steps} | {step["peak_memory_rank"] for step in steps} <= set(range(4))
    assert all(step["rank_step_time_s_min"] <= step["rank_step_time_s_max"] for step in steps)


def test_packed_documents_train_the_same_in_every_layout(losses: Losses) -> None:
    """Micro-batches of one sequence and of four have other numbers of labels that count."""
    packed = ("-w", "pretrain_llama3.1", "--document-tokens", "40")
    one = losses(*packed, "--scale", "1", "--mbs", "1", "--steps", "8")
    several = losses(*packed, "--scale", "2", "--mbs", "4", "--cp", "2", "--steps", "8")
    for single, other in zip(one, several, strict=True):
        assert abs(single["loss"] - other["loss"]) <= 1e-5, single["step"]
        assert other["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-4)
    assert several[-1]["loss"] < several[0]["loss"]


@pytest.mark.measured
def test_all_of_them_together_on_eight_processes_reproduce_one(losses: Losses) -> None:
    options = ("--scale", "8", "--tp", "2", "--pp", "2", "--mbs", "1")
    assert_same_training(losses, "pretrain_llama3.1", *options, steps=8)


GROUPS_OF_TWO = ("--scale", "4", "--dp-sharding", "optimizer", "--dp-shard-size", "2")
COPIES = ("--pp", "2", "--vp", "2", "--dp-sharding", "none")


@pytest.mark.measured
@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("pretrain_llama3.1", GROUPS_OF_TWO),
        ("finetune_llama4-maverick", ("--scale", "4", *COPIES)),
    ],
)
def test_what_ranks_share_out_and_when_they_work_changes_nothing(
    losses: Losses, workload: str, options: tuple[str, ...]
) -> None:
    assert_same_training(losses, workload, *options, steps=20)


@pytest.mark.measured
def test_pipeline_parallel_trains_in_bf16(losses: Losses) -> None:
    options = ("--scale", "2", "--pp", "2", "--steps", "8", "--dtype", "bf16")
    exact = losses("-w", "pretrain_llama3.1", "--scale", "1", "--steps", "20")
    rounded = losses("-w", "pretrain_llama3.1", *options)
    assert 0 < max(abs(a["loss"] - b["loss"]) for a, b in zip(exact, rounded, strict=False)) < 0.03


@pytest.mark.slow
def test_compiled_blocks_reproduce_the_others(losses: Losses) -> None:
    options = ("--scale", "2", "--tp", "2", "--compile", "--recompute", "selective")
    assert_same_training(losses, "pretrain_llama3.1", *options, steps=5)

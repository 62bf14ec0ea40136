# SPDX-License-Identifier: Apache-2.0
"""Whole runs, from the options to the steps' figures: however they are computed, they train the same.

``engine/test_layouts.py`` has every layout.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.base.errors import UsageError
from llmb.engine.device import REPRODUCIBLE, be_deterministic
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

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


@pytest.mark.parametrize(
    "options",
    [
        ("-w", "pretrain_mixtral", "--dtype", "fp8", "--emulate-fp8", "--capacity-factor", "1", "--seq-len", "64"),
        pytest.param((*LLAMA, "--dtype", "bf16", "--compile", "--recompute", "full"), marks=pytest.mark.slow),
        pytest.param(("-w", "pretrain_qwen3", "--dtype", "fp8", "--tp", "2"), marks=pytest.mark.slow),
    ],
)
def test_two_deterministic_runs_are_equal_bit_by_bit(
    losses: Losses, finished: Callable[..., dict[str, Any]], options: tuple[str, ...]
) -> None:
    """JSON has every digit of a number. A label makes it another run, which trains alike."""
    common = (*options, "--scale", "2", "--steps", "3", "--deterministic")
    first, again = (
        [[step[key] for key in ("loss", "grad_norm")] for step in losses(*common, "--label", label)]
        for label in ("first", "again")
    )
    assert first == again
    record = read_record(RunFolder(Path(finished(*common, "--label", "first")["run_dir"])))
    assert record.plan.deterministic


@pytest.mark.parametrize(("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_NVLS_ENABLE", "1")])
def test_a_variable_that_prevents_determinism_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each, valid in REPRODUCIBLE.items():
        monkeypatch.setenv(each, valid[0])
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"--deterministic is set, but {name} is '{value}'"):
        be_deterministic()


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

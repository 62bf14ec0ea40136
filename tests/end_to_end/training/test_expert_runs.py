# SPDX-License-Identifier: Apache-2.0
"""Real training of a model with experts that are spread over ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Finished = Callable[..., dict[str, Any]]

MAVERICK = ("-w", "finetune_llama4-maverick", "--layers", "2", "--scale")
EP2 = (*MAVERICK, "2", "--ep", "2", "--steps", "10")
DROPLESS = (*MAVERICK, "4", "--capacity-factor", "0")
"""Which tokens are dropped depends on the layout."""
ALL = (*DROPLESS, "--tp", "2", "--ep", "2", "--etp", "2", "--steps", "4", "--checkpoint-interval", "2")


def steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls(finished: Finished) -> None:
    losses = [step["loss"] for step in steps(finished(*EP2))]
    assert losses[-1] < losses[0] - 1.0


def test_the_result_has_the_load_of_each_layer_and_its_fullest_rank(finished: Finished) -> None:
    """A rank that has most rows of whole steps has at most as many as the fullest ones of their micro-batches."""
    result = finished("-w", "pretrain_qwen3", "-s", "tiny-moe", "--scale", "2", "--ep", "2", "--steps", "6")
    load, folder = result["expert_load"], Path(result["run_dir"])
    assert result["expert_load_reason"] is None
    assert [layer["layer"] for layer in load["layers"]] == [0, 1, 2, 3]
    of_ranks = [layer["rank_max_over_mean"] for layer in load["layers"]]
    assert load["rank_max_over_mean"] == pytest.approx(sum(of_ranks) / 4)
    assert max(layer["max_over_mean"] for layer in load["layers"]) <= load["max_over_mean"] + 1e-4
    every = [step["expert_load"]["layers_rank_max_over_mean"] for step in steps(result)]
    shares = json.loads((folder / "expert_load.json").read_text())["share_of_tokens"]
    for number, share in shares.items():
        mean = sum(step[int(number)] for step in every) / len(every)
        assert 1 < 2 * max(sum(share[:8]), sum(share[8:])) <= mean + 1e-4 < 2


@pytest.mark.slow
def test_every_layout_counts_the_same_load(finished: Finished) -> None:
    """In the first step, before a run that drops tokens trains another model."""
    one, other = (steps(finished(*options))[0]["expert_load"] for options in (EP2, ALL))
    assert one["max_over_mean"] == pytest.approx(other["max_over_mean"], rel=0.01)
    shares = json.loads((Path(finished(*EP2)["run_dir"]) / "expert_load.json").read_text())["share_of_tokens"]
    assert list(shares) == ["1"]
    assert all(sum(layer) == pytest.approx(1.0) for layer in shares.values())


@pytest.mark.slow
def test_dropped_tokens_are_counted(finished: Finished) -> None:
    result = finished(*EP2)
    load = result["expert_load"]
    assert (load["capacity_factor"], load["forced"]) == (1.0, False)
    assert 0 < load["dropped_pct"] < 100
    assert 0 < steps(result)[0]["expert_load"]["dropped_share"] < 1


@pytest.mark.slow
def test_forced_balance_is_recorded_in_step_result_and_record(finished: Finished) -> None:
    result = finished(*EP2[:-1], "2", "--force-load-balancing", "--recompute", "full")
    assert {step["expert_load"]["max_over_mean"] for step in steps(result)} == {1.0}
    balanced = {"max_over_mean": 1.0, "idle_experts": 0.0, "forced": True, "rank_max_over_mean": 1.0}
    layers = [{"layer": 1, "max_over_mean": 1.0, "rank_max_over_mean": 1.0}]
    assert result["expert_load"] == {**balanced, "capacity_factor": None, "dropped_pct": 0.0, "layers": layers}
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["plan"]["force_load_balancing"] is True


@pytest.mark.slow
def test_a_checkpoint_goes_from_one_arrangement_of_experts_to_another(finished: Finished) -> None:
    whole = finished(*ALL)
    path = next((Path(whole["run_dir"]) / "checkpoints").glob("step=2*"))
    more = ("--steps", "2", "--load-checkpoint", str(path))
    continued = steps(finished(*MAVERICK, "2", "--etp", "2", "--capacity-factor", "0", *more))
    for expected, found in zip(steps(whole)[2:], continued, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)

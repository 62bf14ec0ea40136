# SPDX-License-Identifier: Apache-2.0
"""Runs that profile themselves, with the PyTorch profiler and two processes, and what their traces say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llmb.cli.main import app

SMALL = ("-w", "pretrain_llama3.1", "--scale", "2", "--layers", "2", "--gbs", "4")
OPTIONS = (*SMALL, "--steps", "12", "--profile")
STEPS = ("--profile-start-step", "9", "--profile-stop-step", "11")
PARTS = ("attention", "matrix_product", "other", "memory_copy", "communication_exposed", "idle")


@pytest.fixture(scope="module")
def profiled(finished: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return finished(*OPTIONS, *STEPS)


@pytest.mark.slow
def test_every_chosen_rank_leaves_a_trace_and_profiled_steps_are_left_out(profiled: dict[str, Any]) -> None:
    folder = Path(profiled["run_dir"])
    assert folder.name.endswith("_torchprofile")
    assert profiled["profile"]["files"] == ["torch_profile/rank-0.json.gz", "torch_profile/rank-1.json.gz"]
    assert profiled["profile"]["warnings"] == []
    assert sorted(path.name for path in (folder / "torch_profile").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [step["step"] for step in map(json.loads, lines) if step["profiled"]] == [9, 10]
    assert (profiled["window"]["first"], profiled["window"]["last"]) == (8, 9)
    assert profiled["step_time_s"]["count"] == 1
    kept = json.loads((folder / "breakdown.json").read_text())
    assert kept == profiled["profile"]["breakdown"]
    assert kept["matrix_product_s"] > 0
    assert kept["attention_s"] > 0
    assert sum(kept[f"{part}_s"] for part in PARTS) == pytest.approx(kept["duration_s"], rel=1e-6)


@pytest.mark.slow
def test_traced_steps_last_as_long_as_the_run_says(profiled: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "steps.svg"
    done = CliRunner().invoke(app, ["trace", profiled["run_dir"], "--json", "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    lines = (Path(profiled["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    times = {step["step"]: step["step_time_s"] for step in map(json.loads, lines)}
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["slowest_rank"]["label"] in ("rank 0", "rank 1")
    for rank in document["ranks"]:
        assert [step["step"] for step in rank["steps"]] == [9, 10]
        # A process that waits for a core between the two clocks makes one step longer and its neighbor shorter.
        traced_s = sum(step["duration_s"] for step in rank["steps"])
        assert traced_s == pytest.approx(times[9] + times[10], rel=0.5, abs=0.5)
        for step in rank["steps"]:
            assert sum(step["shares"].values()) == pytest.approx(1)
            assert step["shares"]["matrix_product"] > 0
            assert {item["kind"] for item in step["collectives"]} >= {"all_gather"}
    assert picture.read_text().count("ProfilerStep") == 0
    assert picture.read_text().startswith("<svg ")


@pytest.mark.measured
def test_unprofiled_ranks_and_runs_leave_nothing(finished: Callable[..., dict[str, Any]]) -> None:
    alone = finished(*OPTIONS, *STEPS, "--profile-ranks", "1")
    assert alone["profile"]["files"] == ["torch_profile/rank-1.json.gz"]
    assert alone["profile"]["breakdown"]["rank"] == 1
    plain = finished(*OPTIONS[:-1])
    assert plain["profile"] is None
    assert not (Path(plain["run_dir"]) / "torch_profile").exists()
    assert not (Path(plain["run_dir"]) / "breakdown.json").exists()


@pytest.mark.slow
def test_profiling_does_not_change_what_is_trained(
    profiled: dict[str, Any], finished: Callable[..., dict[str, Any]]
) -> None:
    assert profiled["loss"] == finished(*OPTIONS[:-1])["loss"]

# SPDX-License-Identifier: Apache-2.0
"""One rank of a layout that runs alone: it has its own figures and none of all ranks, whatever shows them."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called_here import Run

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.engine.program import memory_warnings
from llmb.readers.logs.log_files import parse_file
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan, pretending

Finished = Callable[..., dict[str, Any]]
STEPS = ("--steps", "3", "--window", "last")
PP2 = ("-w", "pretrain_llama3.1", "--pretend-scale", "2", "--pp", "2", *STEPS)
LAYOUTS = {
    "TP2": (
        *("-w", "pretrain_llama3.1", "--pretend-scale", "2", "--tp", "2", "--rank", "1"),
        *("--profile", "--profile-start-step", "1", "--profile-stop-step", "2"),
    ),
    "CP2": ("-w", "pretrain_llama3.1", "--pretend-scale", "2", "--cp", "2", "--rank", "1"),
    "EP2": ("-w", "finetune_llama4-maverick", "--pretend-scale", "2", "--ep", "2", "--capacity-factor", "0"),
    "FSDP, FP8": ("-w", "pretrain_llama3.1", "--pretend-scale", "4", "--dp-sharding", "full", "--dtype", "fp8"),
    "all, compiled": (
        *("-w", "pretrain_llama3.1", "--pretend-scale", "16", "--tp", "2", "--pp", "2", "--vp", "2", "--cp", "2"),
        *("--rank", "13", "--dp-sharding", "optimizer", "--compile"),
    ),
}


@pytest.fixture
def pretended(finished: Finished) -> dict[str, Any]:
    return finished(*PP2, "--rank", "1")


@pytest.fixture
def install(pretended: dict[str, Any]) -> Path:
    """The root that has the pretended run."""
    return Path(pretended["run_dir"]).parents[5]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.measured), 1])
def test_a_stage_of_a_pipeline_has_its_compute_time_and_nothing_of_all_ranks(finished: Finished, stage: int) -> None:
    result = finished(*PP2, "--rank", str(stage))
    own = result["pretended"]
    assert (own["rank"], own["ranks"], own["pp_stage"], own["micro_batches"]) == (stage, 2, stage, 8)
    assert own["compute_time_s"]["count"] == 1
    assert own["peak_memory_gib"] > 0
    unknown = ("step_time_s", "loss", "peak_memory_gib", "tokens_per_s", "tflops_per_gpu", "mfu_pct", "verdict")
    assert {result[key] for key in unknown} == {None}
    why = f"PRETEND (rank {stage} of 2 alone): other ranks did nothing"
    assert (result["status"], result["step_time_reason"], result["reasons"]["loss"]) == ("success", why, why)
    assert f"PRETEND (rank {stage} of 2 alone)" in result["title"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.measured] * (name != "EP2")) for name in LAYOUTS]
)
def test_a_rank_of_any_layout_runs_alone(finished: Finished, name: str) -> None:
    result = finished(*LAYOUTS[name], *STEPS)
    assert result["status"] == "success"
    assert result["pretended"]["compute_time_s"]["mean"] > 0
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["plan"]["force_load_balancing"] is (name == "EP2")
    assert (result["profile"] and result["profile"]["breakdown"]["rank"]) == (1 if name == "TP2" else None)


def test_its_steps_are_its_own_and_its_log_has_no_step_line(pretended: dict[str, Any]) -> None:
    folder = Path(pretended["run_dir"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert {(step["loss"], step["grad_norm"], step["slowest_rank"], step["tokens"]) for step in steps} == {
        (None, None, 1, 8 * 128)
    }
    (log,) = folder.glob("log-*.out")
    assert log.read_text().count("PRETEND (rank 1 of 2 alone): step ") == 3
    assert parse_file(log, "all").outcome.status == "not_training_log"
    environment = json.loads((folder / "run.json").read_text())["environment"]
    assert (environment["backend"], list(environment["ranks_per_node"].values())) == ("fake", [1])


def test_it_is_no_reference_and_has_no_verdict(llmb: Run, pretended: dict[str, Any], tmp_path: Path) -> None:
    name = pretended["id"]
    for against in ((), ("--against", name)):
        judged = llmb("judge", name, *against)
        assert judged.returncode == 6
        assert "NOT COMPARABLE: PRETEND (rank 1 of 2 alone): other ranks did nothing" in judged.stdout
        assert "--expect" not in judged.stderr
    written = llmb("judge", name, "--write-expectations", str(tmp_path / "expected.yaml"))
    assert "none of these runs is a measurement" in written.stderr
    assert f"left out: {name}: PRETEND" in llmb("compare", name, name).stderr
    assert "PRETEND (rank 1 of 2 alone)" in llmb("parse", pretended["run_dir"], COLUMNS="200").stdout


def test_every_list_says_that_it_was_pretended(llmb: Run, pretended: dict[str, Any], tmp_path: Path) -> None:
    for command in (("runs",), ("jobs", "show", pretended["id"]), ("watch", pretended["id"]), ("result", "latest")):
        shown = llmb(*command, COLUMNS="200").stdout
        assert "PRETEND (rank 1 of 2 alone)" in shown, command
        assert "tokens/s" not in shown
        assert "loss " not in shown.replace("throughput or loss", "")
    (row,) = json.loads(llmb("runs", "--json").stdout)["runs"]
    assert (row["proxy"], row["step_time_s"], row["verdict"]) == ("PRETEND (rank 1 of 2 alone)", None, None)
    assert llmb("export", pretended["id"], "--format", "csv", "-o", str(tmp_path)).returncode == 0
    (exported,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert (exported["pretended_rank"], exported["step_time_mean_s"], exported["peak_memory_gib"]) == ("1", "", "")
    own = pretended["pretended"]
    assert float(exported["compute_time_mean_s"]) == own["compute_time_s"]["mean"]
    assert llmb("report", pretended["id"], "-o", str(tmp_path / "page.html")).returncode == 0
    assert "PRETEND (rank 1 of 2 alone)" in (tmp_path / "page.html").read_text()


def test_several_ranks_run_in_turn(llmb: Run) -> None:
    layout = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--pretend-scale", "4", "--pp", "2")
    planned = json.loads(llmb(*layout, "--rank", "2,0", "--dry-run", "--json").stdout)
    titles = [run["title"] for run in planned["runs"]]
    assert all(f"PRETEND (rank {rank} of 4 alone)" in title for rank, title in zip((2, 0), titles, strict=True))
    assert "only llmb's own engine runs single ranks" in llmb(*layout, "--framework", "torchtitan", code=2).stderr


def test_a_dry_run_names_the_command_of_the_same_run(llmb: Run) -> None:
    asked = ("run", "-w", "pretrain_llama3.1", "-s", "405b", "--gpu-type", "h100", "--pretend-scale", "512", "--rank")
    shown = llmb(*asked, "71", "--dry-run").stdout
    assert "rank 71, on stage 1: collectives complete immediately" in shown
    assert "of 80 GiB on rank 71" in shown
    planned = json.loads(llmb(*asked, "7", "--dry-run", "--json").stdout)
    assert planned["plan"]["recipe"]["pretended_rank"] == 7
    assert planned["same_run"].endswith("--pretend-scale 512 --rank 7")
    assert "--scale" not in planned["same_run"].split()
    assert planned["plan"]["recipe"]["expectations"] == []


@pytest.mark.parametrize("rank", [0, 511])
def test_only_the_memory_of_the_rank_that_runs_is_checked(rank: int) -> None:
    request = Request(workload="pretrain_llama3.1", size="405b", gpu_type="h100", scale=512, overrides=Overrides(mbs=4))
    recipe = pretending(resolve(Catalogue(), request), rank)
    (warning,) = memory_warnings(make_plan(recipe, Choices(), device="cuda"))
    assert "PRETEND" in warning
    assert f"rank {rank} needs" in warning

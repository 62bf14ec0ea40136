# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a checkpoint is the run that was never ended."""

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_lines import find_loads, find_saves
from fork_server import Fork

from llmb.base.errors import UsageError
from llmb.catalogue.throughput import checkpoint_bytes
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.readers.logs.outcome import judge_log
from llmb.readers.logs.reader import read_log
from llmb.runs.checkpoints.checkpoint import read_checkpoint, read_checkpoint_times, saved_checkpoints
from llmb.runs.checkpoints.checkpoint_files import partial_path
from llmb.runs.experiment import create_run_folder
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import new_record, read_record, write_record
from llmb.runs.steps import read_steps

Finished = Callable[..., dict[str, Any]]
MakePlan = Callable[..., Plan]
Start = Callable[..., list[Fork]]

LLAMA = ("-w", "pretrain_llama3.1")
TEN = ("--steps", "10", "--checkpoint-interval", "5")
FIVE_MORE = ("--steps", "5", "--load-checkpoint")
WORKER = Path(__file__).parent / "continue_worker.py"
SLOW_DISK_WORKER = Path(__file__).parent / "slow_disk_worker.py"
ENDS_WITHIN_S = 300


def steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]


def log(result: dict[str, Any]) -> Path:
    return RunFolder(Path(result["run_dir"])).log


def after_five_steps(result: dict[str, Any]) -> str:
    return str(Path(result["run_dir"]) / "checkpoints" / "step=5-consumed_samples=40")


def assert_same_steps(whole: dict[str, Any], continued: dict[str, Any]) -> None:
    """To the last digits of fp32."""
    expected, found = steps(whole)[5:], steps(continued)
    assert [step["step"] for step in found] == list(range(5, 10))
    for old, new in zip(expected, found, strict=True):
        assert abs(old["loss"] - new["loss"]) <= 1e-6, new["step"]
        assert new["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-4)
        assert new["lr"] == old["lr"]


FOUR = ("--scale", "4", "--tp", "2", "--pp", "2", "--document-tokens", "40")
TWO_STAGES = ("--scale", "2", "--pp", "2", "--vp", "2")


@pytest.mark.measured
def test_a_layout_goes_on_from_another(finished: Finished) -> None:
    """The checkpoint tells of how long documents are packed. More layouts: ``engine/test_checkpoint_state.py``."""
    whole = finished(*LLAMA, *FOUR, *TEN)
    assert_same_steps(whole, finished(*LLAMA, *TWO_STAGES, *FIVE_MORE, after_five_steps(whole)))


@pytest.mark.slow
def test_copies_are_saved_once(finished: Finished, tiny_plan: MakePlan) -> None:
    """Saved by two groups of two ranks, each with all parameters and optimizer state."""
    shallow = (*LLAMA, "--layers", "2")
    whole = finished(*shallow, "--scale", "4", "--dp-sharding", "optimizer", "--dp-shard-size", "2", *TEN)
    assert_same_steps(whole, finished(*shallow, "--scale", "2", *FIVE_MORE, after_five_steps(whole)))
    single = checkpoint_bytes(tiny_plan(overrides={"layers": 2}).recipe.model)
    assert whole["checkpoint"]["size_bytes"] < 1.1 * single


@pytest.mark.slow
def test_what_saving_took_is_told_apart_from_the_steps(finished: Finished) -> None:
    result = finished(*LLAMA, "--scale", "2", *TEN)
    newest = Path(result["run_dir"]) / "checkpoints" / "step=10-consumed_samples=80"
    assert sorted(path.name for path in newest.parent.iterdir()) == [newest.name, "step=5-consumed_samples=40"]
    assert sorted(path.name for path in (newest / "weights").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    told = result["checkpoint"]
    assert told["path"] == str(newest)
    assert told["size_bytes"] == sum(path.stat().st_size for path in (newest / "weights").iterdir())
    assert told["load_s"] is None
    saves = list(find_saves(log(result).read_bytes()))
    kept = read_checkpoint_times(Path(result["run_dir"]) / "checkpoints.jsonl")
    assert [time.step for time in kept] == [save.iteration for save in saves]
    assert result["checkpoint"]["save_s"] == [time.duration_s for time in kept]
    assert [[rank.rank for rank in time.ranks] for time in kept] == [[0, 1], [0, 1]]
    assert [rank.blocked_s is None for time in kept for rank in time.ranks] == [False, False, True, True]
    written = sum((newest / "weights" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1))
    assert kept[-1].size_bytes == written
    assert told["save_gb_per_s"] == pytest.approx(written / 1e9 / max(told["save_s"]))
    assert told["slowest_save_rank"] in (0, 1) and told["load_gb_per_s"] is None
    assert [(save.rank, save.iteration, save.duration_s) for save in saves] == [
        (0, iteration, duration) for iteration, duration in zip((5, 10), told["save_s"], strict=True)
    ]
    assert told["overlapped_steps"] == sum(step["saving"] for step in steps(result))
    assert not any(step["saving"] for step in steps(result)[:5])
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["result"]["checkpoint"] == told


def train_on_slow_disk(plan: Plan, install: Path, start_ranks: Start, slower_s: str) -> RunFolder:
    folder = create_run_folder(install, plan)
    write_record(folder, new_record(plan, ()))
    (rank,) = start_ranks([str(SLOW_DISK_WORKER), str(folder.path)], 1, folder.log, SLOWER_S=slower_s)
    assert rank.wait(timeout=ENDS_WITHIN_S) == 0, folder.log.read_text()
    return folder


@pytest.mark.measured
def test_a_slow_disk_slows_saving_and_not_the_steps(tmp_path: Path, tiny_plan: MakePlan, start_ranks: Start) -> None:
    """A save takes a second, and longer still if the steps up to the next save have not ended by then."""
    plan = tiny_plan(scale=1, steps=6, checkpoint_interval=2)
    folder = train_on_slow_disk(plan, tmp_path, start_ranks, "1")
    result = finish_run(folder, read_record(folder), End(0))
    done = read_steps(folder.steps)
    assert [step.saving for step in done] == [False, False, True, True, True, True]
    assert result.checkpoint is not None
    assert [second > 1 for second in result.checkpoint.save_s] == [True, True, True]
    assert result.checkpoint.overlapped_steps == 4
    assert (plan.window.first, plan.window.last) == (4, 4)
    assert result.checkpoint.overlapped_steps_in_window == 1


@pytest.mark.measured
def test_a_save_that_takes_longer_than_the_stall_limit_is_no_stall(
    tmp_path: Path, tiny_plan: MakePlan, start_ranks: Start
) -> None:
    plan = tiny_plan(scale=1, steps=1, save_checkpoint=True, stall_limit_s=10)
    assert len(saved_checkpoints(train_on_slow_disk(plan, tmp_path, start_ranks, "14").checkpoints)) == 1


@pytest.mark.slow
def test_a_run_that_goes_on_says_so(finished: Finished) -> None:
    whole = finished(*LLAMA, "--scale", "2", *TEN)
    result = finished(*LLAMA, "--scale", "1", *FIVE_MORE, after_five_steps(whole))
    assert_same_steps(whole, result)
    assert result["window"] == {"first": 8, "last": 8, "rule": "reference"}
    assert result["checkpoint"]["save_s"] == []
    assert result["checkpoint"]["path"] is None
    (load,) = find_loads(log(result).read_bytes())
    assert result["checkpoint"]["load_s"] == load.duration_s
    assert result["checkpoint"]["verification"] == "verified"
    assert result["checkpoint"]["verify_s"] >= 0
    assert result["checkpoint"]["slowest_load_rank"] == 0 and result["checkpoint"]["load_gb_per_s"] > 0
    assert f"{after_five_steps(whole)} is verified: 3 files in" in log(result).read_text()
    lines = [line for line in log(result).read_text().splitlines() if line.startswith("Training")]
    assert [line.split()[4] for line in lines] == [f"{step}/9" for step in range(5, 10)]
    assert lines[0].endswith("consumed_samples: 48")
    with log(result).open("rb") as stream:
        outcome = judge_log(read_log(stream, "reference"))
    assert (outcome.status, outcome.reason) == ("success", "step 8 of 10")


@pytest.mark.slow
def test_by_default_one_more_step_is_done(finished: Finished) -> None:
    whole = finished(*LLAMA, "--scale", "2", *TEN)
    path = str(Path(whole["run_dir"]) / "checkpoints" / "step=10-consumed_samples=80")
    assert [step["step"] for step in steps(finished(*LLAMA, "--scale", "1", "--load-checkpoint", path))] == [10]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-w", "pretrain_nemotron4"), "norm is rmsnorm in the checkpoint and layernorm1p in this run"),
        ((*LLAMA, "--layers", "2"), "layers is 4 in the checkpoint and 2 in this run"),
        ((*LLAMA, "--seed", "5"), "was trained with 1234"),
    ],
)
def test_what_does_not_fit_is_refused_before_workers_start(
    start: Callable[..., Any],
    finished: Finished,
    forked_python: str,
    tmp_path: Path,
    options: tuple[str, ...],
    said: str,
) -> None:
    path = after_five_steps(finished(*LLAMA, "--scale", "2", *TEN))
    run = start(*options, "--scale", "2", "--load-checkpoint", path, python=forked_python)
    _, talk = run.process.communicate()
    assert run.process.returncode == 2
    assert said in talk
    assert not list(tmp_path.iterdir())


def swap(one: Path, other: Path) -> None:
    one_content, other_content = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_content)
    other.write_bytes(one_content)


@pytest.fixture
def swapped(finished: Finished, tmp_path: Path) -> Path:
    """A checkpoint with files of another one, which have the same sizes and load without an error."""
    first = Path(after_five_steps(finished(*LLAMA, "--scale", "2", *TEN)))
    copies = [shutil.copytree(path, tmp_path / path.name) for path in sorted(first.parent.iterdir())]
    swap(*(copy / "weights" / "__1_0.distcp" for copy in copies))
    return tmp_path / first.name


@pytest.mark.slow
def test_a_file_of_another_checkpoint_is_refused_and_named(
    swapped: Path, start: Callable[..., Any], forked_python: str, tmp_path: Path
) -> None:
    options = (*LLAMA, "--scale", "2", "--load-checkpoint", str(swapped))
    run = start(*options, python=forked_python, install=tmp_path / "runs")
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 4
    assert "the checkpoint is damaged: - weights/__1_0.distcp has the checksum" in talk
    assert run.record()["result"]["steps"] == 0


@pytest.mark.slow
def test_what_is_not_verified_is_loaded_and_says_so(
    swapped: Path, start: Callable[..., Any], forked_python: str, tmp_path: Path
) -> None:
    options = ["--no-verify-checkpoint", *LLAMA, "--scale", "1", "--load-checkpoint", str(swapped)]
    run = start(*options, python=forked_python, install=tmp_path / "runs")
    out, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 0, talk
    assert "not verified: " in out
    checkpoint = run.record()["result"]["checkpoint"]
    assert (checkpoint["verification"], checkpoint["verify_s"]) == ("skipped", None)


def test_a_checkpoint_dir_that_is_a_file_is_refused_before_workers_start(
    start: Callable[..., Any], forked_python: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    options = ("--save-checkpoint", "--checkpoint-dir", str(tmp_path / "file"))
    run = start(*LLAMA, *options, python=forked_python, install=tmp_path / "runs")
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 3
    assert "checkpoints cannot be saved there: it is a file" in talk
    assert not list((tmp_path / "runs").rglob("run.json"))


@pytest.mark.measured
def test_a_disk_that_fills_up_while_saving_leaves_the_earlier_checkpoints(
    start: Callable[..., Any], tmp_path: Path, small_disk: Callable[[str], list[str]], tiny_plan: MakePlan
) -> None:
    """Files are a few per cent larger than the estimate, so that the third save of three fails half way."""
    size = 3 * checkpoint_bytes(tiny_plan().recipe.model) + 300_000
    options = ("--scale", "2", "--steps", "3", "--checkpoint-interval", "1", "--json")
    run = start(*LLAMA, *options, install=tmp_path / "disk", prefix=small_disk(str(size)))
    out, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 4
    assert "No space left on device" in talk
    assert "LLMB_INSTALL" in talk
    result = json.loads(out)
    assert (result["status"], result["steps"], len(result["checkpoint"]["save_s"])) == ("failed", 3, 2)
    (folder,) = (tmp_path / "kept").rglob("checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == ["step=1-consumed_samples=8", "step=2-consumed_samples=16"]
    assert [checkpoint.record.step for checkpoint in saved_checkpoints(folder)] == [1, 2]


def test_too_small_a_disk_is_said_before_anything_is_written(
    start: Callable[..., Any], tmp_path: Path, small_disk: Callable[[str], list[str]]
) -> None:
    run = start(*LLAMA, "--save-checkpoint", install=tmp_path / "disk", prefix=small_disk("10m"))
    _, talk = run.process.communicate(timeout=ENDS_WITHIN_S)
    assert run.process.returncode == 3
    assert "1 checkpoint needs about 0.0138 GB; the disk has 0.0105 GB free" in talk
    assert not list((tmp_path / "kept").iterdir())


FEW_KILLS, MANY_KILLS = 3, 20
AT_ONCE = 2
LAUNCHER = 2
MOST_STEPS = 200
"""Far more than are done before the kill, on a quick machine and where the test is paused, too."""


def run_and_kill(folder: RunFolder, victim: int, chance: random.Random, start_ranks: Start) -> None:
    """Kills a rank, or whom they take for their launcher, at a random moment after the first checkpoint.

    Half of the time it is while one is written.
    """
    with subprocess.Popen(["sleep", "600"]) as launcher:
        command = ["-m", "llmb.engine.worker", str(folder.path)]
        ranks = start_ranks(command, 2, LLMB_LAUNCHER_PID=str(launcher.pid))
        while not saved_checkpoints(folder.checkpoints):
            assert ranks[0].poll() is None, "the run ended before it saved anything"
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1))
        if chance.random() < 0.5:
            while ranks[0].poll() is None and not list(folder.checkpoints.glob(".*")):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))
        if victim == LAUNCHER:
            launcher.kill()
            assert [rank.wait(ENDS_WITHIN_S) for rank in ranks] == [1, 1]
        else:
            ranks[victim].kill()
            assert ranks[victim].wait() == -signal.SIGKILL
            time.sleep(0.2)  # the other may still do what it does when it lost its peer
        launcher.kill()
    for rank in ranks:  # those of many kills would compute beside each other
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("kills", [FEW_KILLS, pytest.param(MANY_KILLS, marks=pytest.mark.measured)])
@pytest.mark.slow
def test_whenever_a_process_is_killed_the_newest_whole_checkpoint_is_good(
    kills: int, tmp_path: Path, tiny_plan: MakePlan, losses: Callable[..., list[dict[str, Any]]], start_ranks: Start
) -> None:
    saving = tiny_plan(steps=MOST_STEPS, checkpoint_interval=1, overrides={"layers": 1})

    def killed(number: int) -> RunFolder:
        folder = create_run_folder(tmp_path / str(number), saving)
        write_record(folder, new_record(saving, ()))
        run_and_kill(folder, number % 3, random.Random(number), start_ranks)
        return folder

    with ThreadPoolExecutor(AT_ONCE) as pool:
        folders = list(pool.map(killed, range(kills)))
    plans, unfinished = [], 0
    for folder in folders:
        for partial in folder.checkpoints.glob(".*"):
            unfinished += 1
            with pytest.raises(UsageError, match="this checkpoint is incomplete: llmb is still writing"):
                read_checkpoint(partial)
        checkpoints = saved_checkpoints(folder.checkpoints)
        # None with its own name is broken, none is missing, and the last is at most one save behind the steps done.
        assert len(checkpoints) == len([path for path in folder.checkpoints.iterdir() if path.name[0] != "."])
        assert [found.record.step for found in checkpoints] == list(range(1, len(checkpoints) + 1))
        assert len(read_steps(folder.steps)) - len(checkpoints) in (0, 1, 2)
        newest = checkpoints[-1]
        assert not partial_path(newest.path).exists()
        plans.append(tiny_plan(steps=3, checkpoint=newest, overrides={"layers": 1}))
        for old in checkpoints[:-1]:
            shutil.rmtree(old.path)
    assert unfinished or kills == FEW_KILLS
    (tmp_path / "plans.json").write_text(json.dumps([plan.model_dump(mode="json") for plan in plans]))
    for rank in start_ranks([str(WORKER), str(tmp_path / "plans.json"), str(tmp_path / "losses.json")], 2):
        assert rank.wait(ENDS_WITHIN_S) == 0
    compared = max(plan.last_step for plan in plans) + 1
    whole = losses(*LLAMA, "--scale", "2", "--layers", "1", "--steps", str(compared))
    for plan, found in zip(plans, json.loads((tmp_path / "losses.json").read_text()), strict=True):
        expected = [step["loss"] for step in whole[plan.first_step : plan.last_step + 1]]
        assert found == pytest.approx(expected, abs=1e-6, rel=0), plan.first_step


@pytest.mark.slow
def test_checkpoints_can_be_saved_elsewhere_and_asked_for_by_the_environment(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_CHECKPOINT", "true")
    saved = finished(*LLAMA, "--scale", "1", "--steps", "3", "--checkpoint-dir", str(tmp_path / "scratch"))
    path = Path(saved["checkpoint"]["path"])
    assert path.parent == tmp_path / "scratch" / Path(saved["run_dir"]).parent.name
    assert not (Path(saved["run_dir"]) / "checkpoints").exists()
    monkeypatch.delenv("ENABLE_CHECKPOINT")
    monkeypatch.setenv("LOAD_CHECKPOINT_PATH", str(path))
    continued = finished(*LLAMA, "--scale", "1", "--steps", "2")
    assert [step["step"] for step in steps(continued)] == [3, 4]

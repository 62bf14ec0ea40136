# SPDX-License-Identifier: Apache-2.0
"""A training is saved, killed and resumed; what is found, said, kept and left behind."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.bench import checkpoint_bench
from llmb.bench.checkpoint_bench import TrialRequest, drop_cache, raise_if_different
from llmb.bench.kept_measurements import read_measurements
from llmb.bench.records import CheckpointTrial, MeasurementFile, RepeatedStep
from llmb.catalogue.resolve import Request
from llmb.checkpoints.times import RankTransfer, checkpoint_time
from llmb.cli.main import app, exit_code_of
from llmb.errors import RunFailed, UserInterrupt
from llmb.processes.families import kill_workers
from llmb.processes.ranks import words
from llmb.report.bench_report import trial_tables
from llmb.report.table import table_lines
from llmb.runs.choices import Choices

Call = Callable[..., int]
SMALL = ("-w", "pretrain_llama3.1", "-s", "tiny", "--layers", "2", "--seq-len", "32", "--steps", "2", "--after", "2")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The user's folder, with a file of the user's own."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "own").write_text("mine")
    return folder


@pytest.fixture
def bench(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path / "root"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*arguments: str, path: Path = place) -> int:
        return exit_code_of(app, ["bench", "checkpoint", *SMALL, "--path", str(path), *arguments])

    return call


def assert_untouched(place: Path) -> None:
    assert [path.name for path in place.iterdir()] == ["own"]
    assert (place / "own").read_text() == "mine"


@pytest.mark.slow
def test_a_killed_training_goes_on_as_it_was(
    bench: Call, tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--scale", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    found = document["checkpoint"]
    assert [step["step"] for step in found["steps"]] == [2, 3]
    for step in found["steps"]:
        assert (step["loss"], step["grad_norm"]) == (step["resumed_loss"], step["resumed_grad_norm"])
    assert found["tolerance"] == 0
    assert (found["path"], found["saved_after"], found["files"]) == (str(place), 2, 3)
    assert_untouched(place)
    _check_rates(document)
    _check_kill(found, tmp_path / "root")
    (kept,) = read_measurements(tmp_path / "root")
    assert kept.model_dump(mode="json")["checkpoint"] == found
    assert exit_code_of(app, ["bench", "list", "--benchmark", "checkpoint", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["changes"]) == len(document["measurements"])


def _check_rates(document: dict[str, Any]) -> None:
    found, rows = document["checkpoint"], document["measurements"]
    load = "load" if found["cache"] == "dropped" else "load_from_memory"
    assert [(row["case"], row["rank"]) for row in rows] == [
        (case, rank) for case in ("save", load) for rank in (None, 0, 1)
    ]
    for row in rows:
        assert row["bandwidth_gb_per_s"] == pytest.approx(row["size_bytes"] / 1e9 / row["time_s"])
    save, loaded = found["save"], found["load"]
    written = sum(rank["size_bytes"] for rank in save["ranks"])
    assert 0.9 * found["size_bytes"] < written < found["size_bytes"], "all but the metadata"
    for rank in save["ranks"]:
        assert 0 < rank["duration_s"] <= save["duration_s"] + 0.001
        assert 0 < rank["blocked_s"] < save["duration_s"] + 0.001
    for rank in loaded["ranks"]:
        assert 0 < rank["duration_s"] <= loaded["duration_s"] + 0.001
        assert rank["size_bytes"] > 0 and rank["blocked_s"] is None


def _check_kill(found: dict[str, Any], root: Path) -> None:
    """All ranks were killed, none of them ended by itself; neither run is in the user's history."""
    killed, resumed = map(Path, found["runs"])
    log = next(killed.glob("log-*.out")).read_text()
    assert "was killed by signal 9 (SIGKILL)" in log and "was killed by signal 9 (SIGKILL)" in found["killed"]
    record = json.loads((killed / "run.json").read_text())
    assert record["status"] == "failed" and record["result"]["steps"] < 1000 < record["plan"]["steps"]
    assert json.loads((resumed / "run.json").read_text())["status"] == "success"
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(killed) not in process.read_text()
        except OSError:
            continue  # it ended while we looked
    assert root / ".llmb" / "bench_runs" in killed.parents
    assert not (root / "workloads").exists() and not (root / "latest").exists()


@pytest.mark.slow
def test_a_checkpoint_that_lost_its_optimizer_state_is_another_training(
    bench: Call, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step has the loss of the loaded weights; only the next one shows it."""

    def lose(files: list[Path], memory: str | None) -> str:
        record = files[0].parents[1] / "checkpoint.json"
        text = record.read_text()
        assert '"optimizer_state": true' in text
        record.write_text(text.replace('"optimizer_state": true', '"optimizer_state": false'))
        return "tried nothing"

    monkeypatch.setattr(checkpoint_bench, "drop_cache", lose)
    assert bench("--scale", "1") == 4
    said = capsys.readouterr()
    (kept,) = read_measurements(tmp_path / "root")
    assert kept.checkpoint is not None
    step = kept.checkpoint.steps[1]
    assert kept.checkpoint.first_difference == step
    assert f"Step 3: loss {step.loss!r} before and {step.resumed_loss!r} resumed" in " ".join(said.err.split())
    assert "ANOTHER TRAINING from step 3" in said.out
    assert "cache: not dropped (tried nothing)" in said.out and "GB/s, memory" in said.out
    assert {row.case for row in kept.measurements} == {"save", "load_from_memory"}
    assert_untouched(place)


Usage = namedtuple("Usage", "total used free")


def test_what_cannot_be_done_is_refused_before_anything_is_written(
    bench: Call, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(path=tmp_path / "none") == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert bench("--nodes", "2") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "llmb submit -w pretrain_llama3.1 -s tiny --checkpoint-dir" in said and "--load-checkpoint" in said
    assert bench("--save-checkpoint") == 2
    assert "--save-checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1_000_000))
    assert bench() == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "a checkpoint needs about 0.0" in said and "the disk has 0.001 GB free" in said and "--path" in said
    assert_untouched(place)
    assert not (tmp_path / "root").exists()


def test_an_interruption_leaves_nothing_of_the_trial_and_all_of_the_users(place: Path, tmp_path: Path) -> None:
    request, said = Request(workload="pretrain_llama3.1", size="tiny"), list[str]()
    wanted = TrialRequest(
        request=request, choices=Choices(), before=1, after=1, place=place, install=tmp_path, keep=True, command=()
    )
    with pytest.raises(UserInterrupt, match="SIGTERM"):  # noqa: SIM117 (as in the code)
        with checkpoint_bench._interruptible(), checkpoint_bench._own_folder(wanted, said.append) as folder:
            (folder / "file").write_text("")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    assert_untouched(place)
    with checkpoint_bench._own_folder(wanted, said.append) as folder:
        (folder / "file").write_text("")
    assert (folder / "file").exists() and said == [f"the checkpoint is kept in {folder}"]


RANK = """
import pathlib, signal, sys, time, os
here = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
def end(*_):
    here.with_suffix(".ended").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
here.touch()
time.sleep(600)
end()
"""


def test_no_rank_that_is_killed_gets_to_end_in_order(tmp_path: Path) -> None:
    command = [sys.executable, *words(1, 3), sys.executable, "-c", RANK, str(tmp_path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.iterdir())) < 3:
        assert launcher.poll() is None
        time.sleep(0.01)
    kill_workers(launcher)  # type: ignore[arg-type]
    _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert "was killed by signal 9 (SIGKILL)" in said  # it does not wait for the others, to whom the same happened
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_files_leave_the_page_cache_or_it_is_said_why_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2**20))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as used:
        assert sum(used[:: mmap.PAGESIZE]) > 0
        assert drop_cache([file], None) == "100 % stayed in the page cache"
    left = drop_cache([file], None)
    assert left == ("100 % stayed in the page cache" if checkpoint_bench._memory(tmp_path) else None)
    assert drop_cache([file], "tmpfs") == "tmpfs is memory"
    assert drop_cache([tmp_path / "none"], None) == "No such file or directory"


def trial(tolerance: float, resumed_loss: float, cache_reason: str | None = None) -> CheckpointTrial:
    ranks = [RankTransfer(rank=rank, size_bytes=9 * 10**10, duration_s=30.0 + rank, blocked_s=2.5) for rank in (0, 1)]
    loads = [RankTransfer(rank=rank, size_bytes=9 * 10**10, duration_s=20.0 - rank) for rank in (0, 1)]
    steps = [RepeatedStep(step=5, loss=7.5, resumed_loss=resumed_loss, grad_norm=1.0, resumed_grad_norm=1.0)]
    return CheckpointTrial(
        path="/lustre/me", file_system="lustre", mounted_at="/lustre", source="10.0.0.1@o2ib:/fs", free_bytes=10**15,
        size_bytes=18 * 10**10, files=3, saved_after=5, killed="rank 1 on node-17 was killed by signal 9 (SIGKILL)",
        save=checkpoint_time("save", 0.0, 40.0, 5, ranks), load=checkpoint_time("load", 0.0, 25.0, None, loads),
        cache="not dropped" if cache_reason else "dropped", cache_reason=cache_reason, steps=tuple(steps),
        tolerance=tolerance, runs=("/killed", "/resumed"),
    )  # fmt: skip


def shown(found: CheckpointTrial) -> list[str]:
    recipe = "pretrain_llama3.1 70b bf16 on 2 x h100"
    at = "2026-11-22T10:00:00+00:00"
    measured = MeasurementFile(
        node="n", measured_at=at, command=(), software={}, measurements=(), recipe=recipe, checkpoint=found
    )
    return [line.text for table in trial_tables(measured) for line in table_lines(table, 80)]


def test_the_table_fits_80_columns_with_the_slowest_rank_first() -> None:
    lines = shown(trial(0.01, 7.505))
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.startswith(("0 ", "1 ", "all "))]
    assert rows[:2] == [
        ["1", "90", "31", "2.903", "2.5", "90", "19", "4.737"],
        ["0", "90", "30", "3", "2.5", "90", "20", "4.5"],
    ]
    assert rows[2] == ["all", "180", "40", "4.5", "180", "25", "7.2"]
    text = " ".join(" ".join(lines).split())
    assert "losses of steps 5 to 5 differ by at most 0.005, of 0.01 allowed" in text
    assert "cache: dropped" in text


@pytest.mark.parametrize(("tolerance", "loss"), [(0.0, 7.500000000000001), (0.01, 7.52), (1e-6, 7.50001)])
def test_losses_that_differ_are_a_failure_with_both_values(tolerance: float, loss: float) -> None:
    with pytest.raises(RunFailed, match=f"Step 5: loss 7.5 before and {loss} resumed") as error:
        raise_if_different(trial(tolerance, loss))
    assert error.value.where == "/resumed"
    for same in (trial(tolerance, 7.5), trial(0.01, 7.509)):
        raise_if_different(same)

# SPDX-License-Identifier: Apache-2.0
"""A log is read as it grows."""

import os
from pathlib import Path

import pytest
from step_lines import step_line

from llmb.analysis.watched_run import SILENT_S, WatchedLog, Watcher

STEPS = 20


def line(step: int, time_s: float = 2.5) -> str:
    return step_line(step, STEPS, loss=1.5, step_time_s=time_s)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "slurm-4711.out"
    path.write_text("NeMo starts\n")
    return path


def append(log: Path, text: str) -> None:
    with log.open("a") as stream:
        stream.write(text)


def seen(watched: WatchedLog, now_s: float) -> tuple[str, list[int]]:
    here = watched.look(now_s)
    return here.state, [step.step for step in watched.new()]


def test_steps_are_read_once_and_only_whole(log: Path) -> None:
    watched, now_s = WatchedLog(log), log.stat().st_mtime
    assert seen(watched, now_s) == ("starting", [])
    append(log, line(0) + line(1)[:60])
    assert seen(watched, now_s) == ("running", [0])
    append(log, line(1)[60:] + line(2))
    assert seen(watched, now_s) == ("running", [1, 2])
    assert seen(watched, now_s) == ("running", [])
    append(log, "".join(map(line, range(3, STEPS))))
    assert seen(watched, now_s) == ("ended", list(range(3, STEPS)))


def test_what_the_line_says(log: Path) -> None:
    append(log, line(0))
    watched = WatchedLog(log)
    assert watched.look(0.0).last_step == STEPS - 1
    (step,) = watched.new()
    assert (step.step_time_s, step.loss, step.tflops_per_gpu, step.grad_norm) == (2.5, 1.5, 600.0, None)


def test_a_line_of_several_ranks_is_one_step(log: Path) -> None:
    append(log, line(0) + line(0) + line(1))
    watched = WatchedLog(log)
    assert seen(watched, log.stat().st_mtime)[1] == [0, 1]


def test_a_log_that_was_replaced_is_read_again(log: Path) -> None:
    append(log, line(0) + line(1))
    watched = WatchedLog(log)
    assert seen(watched, log.stat().st_mtime)[1] == [0, 1]
    fresh = log.with_name("fresh")
    fresh.write_text(line(0))
    fresh.replace(log)
    assert seen(watched, log.stat().st_mtime)[1] == [0]
    log.write_text("")
    assert seen(watched, log.stat().st_mtime)[1] == []
    append(log, line(5))
    assert seen(watched, log.stat().st_mtime)[1] == [5]


def test_long_chunks_do_not_lose_a_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.analysis.watched_run.CHUNK_BYTES", 97)
    append(log, "".join(map(line, range(STEPS))))
    assert seen(WatchedLog(log), log.stat().st_mtime) == ("ended", list(range(STEPS)))


def test_a_log_that_grows_no_more_has_ended(log: Path) -> None:
    append(log, line(0) + line(1, time_s=200.0))
    watched, written_s = WatchedLog(log), log.stat().st_mtime
    assert watched.look(written_s + SILENT_S + 1).state == "running", "a step may take longer than usual"
    here = watched.look(written_s + 20 * 200 + 1)
    assert (here.state, here.why) == ("ended", "its log has not grown for 67 min")
    os.utime(log, (written_s + 5000, written_s + 5000))
    assert watched.look(written_s + 5001).state == "running"


def test_a_log_without_steps_ends_likewise(log: Path) -> None:
    written_s = log.stat().st_mtime
    assert WatchedLog(log).look(written_s + SILENT_S - 1).state == "starting"
    here = WatchedLog(log).look(written_s + SILENT_S + 1)
    assert (here.state, here.why) == ("ended", "its log has no step")


def megatron(iteration: int, last: int = 30) -> str:
    return (
        f"iteration {iteration:>8}/{last:>8} | consumed samples: 8 | elapsed time per iteration (ms): 9089.0 |"
        " learning rate: 1.0E-05 | global batch size: 8 | lm loss: 9.5E+00 | loss scale: 1.0 | grad norm: 2.5 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def test_steps_that_count_from_one(log: Path) -> None:
    append(log, "".join(map(megatron, range(1, 12))))
    watched = WatchedLog(log)
    here = watched.look(log.stat().st_mtime)
    steps = list(watched.new())
    assert (here.first_step, here.last_step, steps[0].step, steps[-1].step) == (1, 30, 1, 11)
    assert (steps[0].step_time_s, steps[0].loss, steps[0].grad_norm) == (9.089, 9.5, 2.5)
    found = Watcher(WatchedLog(log)).look(log.stat().st_mtime)
    assert (found.done, found.total, found.forecast and found.forecast.steps_left) == (11, 30, 19)


def test_an_end_that_is_not_declared(log: Path) -> None:
    """torchtitan without its header."""
    for step in range(10, 60, 10):
        text = f"step: {step:>2}  loss: 7.8201  grad_norm: 2.0213  memory: 41.20GiB(51.78%)  tps: 5,762  mfu: 33.74%"
        append(log, f"[rank0]:[titan] 2025-06-01 10:{step}:00,123 - root - INFO - \x1b[31m{text}\x1b[39m\n")
    now_s = log.stat().st_mtime
    found = Watcher(WatchedLog(log)).look(now_s)
    assert (found.circumstances.state, found.total, found.forecast) == ("running", None, None)
    assert found.steps[-1].step == 50
    assert Watcher(WatchedLog(log)).look(now_s + 10**6).circumstances.state == "ended"

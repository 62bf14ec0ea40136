# SPDX-License-Identifier: Apache-2.0
"""A log is read as it grows."""

import os
from pathlib import Path

import pytest

from llmb.analysis.watched_log import SILENT_S, WatchedLog
from llmb.logs.step_line import format_step_line

STEPS = 20


def line(step: int, time_s: float = 2.5) -> str:
    text = format_step_line(
        step=step,
        steps=STEPS,
        lr=1e-4,
        global_batch_size=8,
        peak_memory_bytes=1,
        memory_allocated_bytes=1,
        loss=1.5,
        step_time_s=time_s,
        tflops_per_gpu=600.0,
        consumed_samples=8,
    )
    return f"{text}\n"


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
    monkeypatch.setattr("llmb.analysis.watched_log.CHUNK_BYTES", 97)
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

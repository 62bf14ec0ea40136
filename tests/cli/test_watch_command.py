# SPDX-License-Identifier: Apache-2.0
"""``llmb watch`` as its users call it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_rows import job_row
from recorded_runs import gpu_record, write_run
from slowed_runs import Slow, slowed
from step_lines import step_line

from llmb.cli import watch as watched
from llmb.cli.main import app, exit_code_of
from llmb.cli.watch import job_of_label
from llmb.jobs.history import open_history
from llmb.jobs.job import Job

LLMB = ("-m", "llmb.cli.main")
TINY = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1")
ROOT = Path(__file__).resolve().parents[1] / "data" / "root"
WITHIN_S = 600
Called = Callable[..., tuple[str, str]]


def environ_of(install: Path) -> dict[str, str]:
    return {**os.environ, "LLMB_INSTALL": str(install)}


def llmb(python: str, install: Path, *command: str) -> str:
    """What the command prints."""
    words, environ = [python, *LLMB, *command], environ_of(install)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """The same in this process; the exit code is asserted, and what was written comes back."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))

    def call(*command: str, code: int = 0) -> tuple[str, str]:
        found = exit_code_of(app, list(command))
        out, err = capsys.readouterr()
        assert found == code, (out, err)
        return out, err

    return call


def lines(last: int, loss: float = 1.5) -> str:
    """Of the first steps of 20."""
    return "".join(step_line(step, 20, loss=loss, step_time_s=2.5 + 0.001 * (step * 7 % 5)) for step in range(last + 1))


def copied_run(status: str, tmp_path: Path) -> Path:
    """A copy of a run folder, outside of an install root."""
    for record in sorted(ROOT.glob("workloads/pretrain*/experiments/*/*/*/run.json")):
        if json.loads(record.read_text())["status"] == status:
            folder = tmp_path / "copy" / record.parent.name
            shutil.copytree(record.parent, folder)
            return folder
    raise AssertionError(status)


def test_a_finished_log_prints_its_end(called: Called, tmp_path: Path) -> None:
    log = tmp_path / "run.out"
    log.write_text(lines(19))
    out, _ = called("watch", str(log), "--expect-s", "2")
    assert out.splitlines()[0] == "run.out"
    assert "step 20/20  2.503 s  loss 1.5  median 2.502 s  ended" in out
    assert "WARNING: steps take 25.1 % longer than expected (as given)" in out
    document = json.loads(called("watch", str(log), "--json")[0])
    assert (document["state"], document["steps_done"], document["steps_total"]) == ("ended", 20, 20)
    assert document["last_steps"][-1]["tflops_per_gpu"] == 600.0
    assert (document["result"], document["forecast"], document["concerns"]) == (None, None, [])


def test_a_log_that_is_written_no_more_has_failed(called: Called, tmp_path: Path) -> None:
    log = tmp_path / "run.out"
    log.write_text(lines(7) + "RuntimeError: link down\n")
    os.utime(log, (time.time() - 7200, time.time() - 7200))
    _, err = called("watch", str(log), code=4)
    assert "died after step 7 of 20; RuntimeError: link down" in err


def test_a_log_with_a_loss_that_is_not_finite_is_invalid(called: Called, tmp_path: Path) -> None:
    log = tmp_path / "run.out"
    log.write_text(lines(19, loss=float("nan")))
    document = json.loads(called("watch", str(log), "--json", code=6)[0])
    assert [concern["kind"] for concern in document["concerns"]] == ["not_finite"]
    assert document["last_steps"][0]["loss"] is None


def test_a_look_at_a_log_that_grows(called: Called, tmp_path: Path) -> None:
    log = tmp_path / "run.out"
    log.write_text(lines(14))
    table = called("watch", str(log), "--once")[0]
    assert "15 of 20 (75 %)" in table
    document = json.loads(called("watch", str(log), "--once", "--json")[0])
    assert document["state"] == "running"
    assert document["forecast"]["steps_left"] == 5
    assert document["forecast"]["remaining_s"] <= 5 * 2.51


@pytest.mark.parametrize(("status", "code"), [("success", 0), ("failed", 4)])
def test_a_run_that_has_ended_prints_its_result(called: Called, tmp_path: Path, status: str, code: int) -> None:
    folder = copied_run(status, tmp_path)
    out, _ = called("watch", str(folder), code=code)
    assert ("step time s, mean" in out) == (status == "success")
    document = json.loads(called("watch", str(folder.parent), "--json", code=code)[0])
    assert document["result"]["status"] == status
    assert called("watch", str(next(folder.glob("log-*.out"))), code=code)[0] == out


def test_what_cannot_be_watched(called: Called, tmp_path: Path) -> None:
    assert "no run is running or queued here" in called("watch", code=2)[1]
    assert "there are no runs yet" in called("watch", "latest", code=2)[1]
    assert "there is no such file" in called("watch", "./nothing", code=2)[1]
    assert "there is no run in this folder" in called("watch", str(tmp_path), code=2)[1]
    (tmp_path / "run.json").write_text("{")
    assert "record cannot be read" in called("watch", str(tmp_path), code=2)[1]


@contextmanager
def running(python: str, install: Path, steps: int, *slow: Slow) -> "Iterator[subprocess.Popen[str]]":
    """A run that has done its first steps."""
    command = [python, *LLMB, *TINY, "--steps", str(steps)]
    # On a busy machine, threads that wait for each other make a step last ten times as long.
    environ = {**environ_of(install), "OMP_NUM_THREADS": "1", **slowed(*slow)}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(path.read_text().count("\n") > 1 for path in install.rglob("metrics.jsonl")), process)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(WITHIN_S)


def wait_for(true: Any, process: "subprocess.Popen[Any]") -> None:
    end = time.monotonic() + WITHIN_S
    while not true():
        assert process.poll() is None and time.monotonic() < end, "it did not come"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_run_is_watched_to_its_end(tmp_path: Path, forked_python: str) -> None:
    # 18 seconds in all: on a busy machine a command takes seconds to start, and has to see some of the steps.
    with running(forked_python, tmp_path, 12, Slow("pace", ms=1500)) as process:
        done = llmb(forked_python, tmp_path, "watch", "--interval", "0.3")
        assert process.wait(WITHIN_S) == 0
    shown = [line for line in done.splitlines() if line.startswith("step ")]
    assert len([line for line in shown if " s left" in line or " min " in line]) >= 2
    assert any(line.startswith("step 12/12 ") for line in shown)
    assert "step time s, mean" in done
    by_folder = next(tmp_path.rglob("run.json")).parent
    assert "step time s, mean" in llmb(forked_python, tmp_path, "watch", str(by_folder))
    document = json.loads(llmb(forked_python, tmp_path, "watch", "latest", "--json"))
    assert (document["state"], document["steps_done"], document["result"]["status"]) == ("ended", 12, "success")
    assert document["job_id"].startswith("local-")


@pytest.mark.slow
def test_an_interrupt_ends_the_watching_and_a_kill_the_run(
    tmp_path: Path, forked_python: str, interrupts: None
) -> None:
    with running(forked_python, tmp_path, 10_000, Slow("pace", ms=300)) as process:
        watcher = start_watching(sys.executable, tmp_path)
        watcher.send_signal(signal.SIGINT)
        out, err = watcher.communicate(timeout=WITHIN_S)
        assert watcher.returncode == 130, (out, err)
        assert "stopped watching; the run continues" in err
        assert process.poll() is None
        watcher = start_watching(forked_python, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        out, err = watcher.communicate(timeout=WITHIN_S)
    assert watcher.returncode == 4, (out, err)
    assert "its process was killed, after " in out + err


def start_watching(python: str, install: Path) -> "subprocess.Popen[str]":
    """Once it has shown a step."""
    command = [python, *LLMB, "watch", "--interval", "0.3"]
    watcher = subprocess.Popen(
        command, env=environ_of(install), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watcher.stdout
    while not watcher.stdout.readline().startswith("step "):
        assert watcher.poll() is None
    return watcher


def labeled(install: Path, number: int, mean_s: float, status: str) -> Job:
    """A run of the label ``night`` in the history, and its folder; its scheduler is not asked."""
    record = gpu_record().model_copy(update={"label": "night"})
    run_dir = write_run(install / "workloads" / "pretrain_llama3.1" / "experiments" / "exp", record, [mean_s] * 50)
    recipe = {"size": "8b", "dtype": "bf16", "gpu_type": "h100", "scale": 8}
    row = {"job_id": str(4000 + number), "submitted_s": float(number), "state": "COMPLETED", "checked_s": 1.0}
    return job_row(f"k{number}", run_dir=str(run_dir), experiment="exp", status=status, label="night", **recipe, **row)


def test_a_label_is_its_run_that_lasts_or_its_newest(tmp_path: Path) -> None:
    jobs = [labeled(tmp_path, number, 10.0 + number, "success") for number in range(3)]
    with open_history(tmp_path, print) as store:
        store.add(jobs)
        assert job_of_label(store, "night", lambda job: job) == jobs[2]
        assert job_of_label(store, "day", lambda job: job) is None
        assert job_of_label(store, "4001", lambda job: job) is None
        running = replace(jobs[0], key="k9", job_id="4009", state="RUNNING", status="running")
        store.add([running])
        assert job_of_label(store, "night", lambda job: job) == running


def test_expectations_of_a_file_are_those_of_judge(called: Called, tmp_path: Path) -> None:
    with open_history(tmp_path, print) as store:
        store.add([labeled(tmp_path, 1, 13.0, "success")])
    published = json.loads(called("watch", "night", "--once", "--json")[0])["expectation"]["expected"]
    assert (published["step_time_s"], published["source"].partition(",")[0]) == (12.27, "published")
    file = tmp_path / "expected.yaml"
    file.write_text("tolerance_pct: 2\nexpectations:\n- {size: 8b, dtype: fp8, step_time_s: 9}\n")
    assert "no entry of" in called("watch", "night", "--once", "--expect", str(file), code=2)[1]
    file.write_text(file.read_text() + "- {size: 8b, dtype: bf16, step_time_s: 12.5}\n")
    (document, *_) = called("watch", "night", "--once", "--json", "--expect", str(file))
    found = json.loads(document)["expectation"]
    assert (found["expected"]["step_time_s"], found["expected"]["tolerance_pct"]) == (12.5, 2.0)
    assert found["standing"] == "slower"
    assert found["expected"]["source"].startswith(f"{file}:4")
    said = called("watch", "night", "--once", "--expect", str(file), "--expect-s", "3", code=2)[1]
    assert "--expect and --expect-s cannot be combined" in said


def test_a_run_that_ended_does_not_last_in_a_history_that_cannot_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = replace(labeled(tmp_path, 1, 10.0, "queued"), state="PENDING")
    monkeypatch.setattr(watched, "current", lambda store, install, job: replace(job, status="success"))
    with open_history(tmp_path, print) as store:
        store.add([queued])
        store.lock_changes()
        assert watched.asker(store, tmp_path)(queued).status == "success"

# SPDX-License-Identifier: Apache-2.0
"""``llmb watch`` as its users call it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from called_here import MODULE, WITHIN_S, Run, environ_of
from job_rows import job_row
from recorded_runs import gpu_record, write_run
from slowed_runs import Slow, slowed

from llmb.cli.watch import _labeled
from llmb.jobs import follow
from llmb.jobs.follow import asker
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.runs.folder import RunFolder

TINY = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1")
ROOT = Path(__file__).resolve().parents[1] / "data" / "root"


def copied_run(status: str, tmp_path: Path) -> Path:
    """A copy of a run folder, outside of an install root."""
    for record in sorted(ROOT.glob("workloads/pretrain*/experiments/*/*/*/run.json")):
        if json.loads(record.read_text())["status"] == status:
            folder = tmp_path / "copy" / record.parent.name
            shutil.copytree(record.parent, folder)
            return folder
    raise AssertionError(status)


@pytest.mark.parametrize(("status", "code"), [("success", 0), ("failed", 4)])
def test_a_run_that_has_ended_prints_its_result(llmb: Run, tmp_path: Path, status: str, code: int) -> None:
    folder = copied_run(status, tmp_path)
    out = llmb("watch", str(folder), code=code).stdout
    assert ("step time s, mean" in out) == (status == "success")
    document = llmb("watch", str(folder.parent), "--json", code=code).document
    assert document["result"]["status"] == status
    assert llmb("watch", str(next(folder.glob("log-*.out"))), code=code).stdout == out


def test_what_cannot_be_watched(llmb: Run, tmp_path: Path) -> None:
    assert "no run is running or queued" in llmb("watch", code=2).stderr
    assert "there are no runs yet" in llmb("watch", "latest", code=2).stderr
    assert "no such file" in llmb("watch", "./nothing", code=2).stderr
    assert "the folder directly contains no runs" in llmb("watch", str(tmp_path), code=2).stderr
    (tmp_path / "run.json").write_text("{")
    assert "record cannot be read" in llmb("watch", str(tmp_path), code=2).stderr


def test_the_log_of_another_program_is_for_parse(llmb: Run, tmp_path: Path) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text("step 1\n")
    said = llmb("watch", str(log), code=2).stderr
    assert "not a run's log, steps or record" in said and f"'llmb parse {log}'" in said


@contextmanager
def running(python: str, install: Path, steps: int, *slow: Slow) -> "Iterator[subprocess.Popen[str]]":
    """A run that has done its first steps."""
    command = [python, *MODULE, *TINY, "--steps", str(steps)]
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


@pytest.mark.measured
def test_a_run_is_followed_to_its_end(llmb_program: Run, tmp_path: Path, forked_python: str) -> None:
    # 18 seconds in all: on a busy machine a command takes seconds to start, and has to see some of the steps.
    with running(forked_python, tmp_path, 12, Slow("pace", ms=1500)) as process:
        watching = start_watching(forked_python, tmp_path, "--expect", "0.1")
        out, err = watching.communicate(timeout=WITHIN_S)
        assert process.wait(WITHIN_S) == watching.returncode == 0, err
    assert "iteration 11/11" in out, "the log"
    assert "step time s, mean" in out
    assert len(re.findall(r"step time s|llmb: step \d+/12 .* left", out + err)) >= 2
    assert err.count("longer than expected (0.1 s, as given)") == 1
    by_folder = next(tmp_path.rglob("run.json")).parent
    assert "step time s, mean" in llmb_program(tmp_path, "watch", str(by_folder)).stdout
    document = llmb_program(tmp_path, "watch", "latest", "--json").document
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


def start_watching(python: str, install: Path, *words: str) -> "subprocess.Popen[str]":
    """Once it has shown a step."""
    command = [python, *MODULE, "watch", *words]
    watcher = subprocess.Popen(
        command, env=environ_of(install), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watcher.stderr
    while "llmb: step " not in watcher.stderr.readline():
        assert watcher.poll() is None
    return watcher


def labeled(install: Path, number: int, mean_s: float, status: str) -> Job:
    """A run of the label ``night`` in the history, and its folder; its scheduler is not asked."""
    record = gpu_record().model_copy(update={"label": "night"})
    run_dir = write_run(install / "workloads" / "pretrain_llama3.1" / "experiments" / "exp", record, [mean_s] * 50)
    recipe = {"size": "8b", "dtype": "bf16", "gpu_type": "h100", "scale": 8}
    row = {"job_id": str(4000 + number), "submitted_s": float(number), "state": "COMPLETED", "checked_s": 1.0}
    return job_row(f"k{number}", run_dir=str(run_dir), experiment="exp", status=status, label="night", **recipe, **row)


def test_a_label_is_its_run_that_is_running_or_its_newest(tmp_path: Path) -> None:
    jobs = [labeled(tmp_path, number, 10.0 + number, "success") for number in range(3)]
    with open_history(tmp_path, print) as store:
        store.add(jobs)
        assert _labeled(store, "night", lambda job: job) == jobs[2]
        assert _labeled(store, "day", lambda job: job) is None
        assert _labeled(store, "4001", lambda job: job) is None
        running = replace(jobs[0], key="k9", job_id="4009", state="RUNNING", status="running")
        store.add([running])
        assert _labeled(store, "night", lambda job: job) == running


def test_what_is_expected_is_published_or_given(llmb: Run, tmp_path: Path) -> None:
    with open_history(tmp_path, print) as store:
        store.add([labeled(tmp_path, 1, 13.0, "success")])
    found = llmb("watch", "night", "--once", "--json", code=0).document["expectation"]
    assert (found["expected"]["step_time_s"], found["expected"]["source"].partition(",")[0]) == (12.27, "published")
    found = llmb("watch", "night", "--once", "--json", "--expect", "10", code=0).document["expectation"]
    assert (found["expected"]["source"], found["standing"]) == ("as given", "slower")
    assert found["delta_pct"] == pytest.approx(30)
    assert "step 50/50  13 s" in llmb("watch", "night", "--once", code=0).stdout


def test_the_log_of_a_run_with_a_damaged_record_is_followed(llmb: Run, tmp_path: Path) -> None:
    job = labeled(tmp_path, 1, 10.0, "failed")
    folder = RunFolder(Path(job.run_dir))
    folder.log.write_text("a line\n")
    with open_history(tmp_path, print) as store:
        store.add([job])
    done = llmb("jobs", "log", "4001", "--follow", code=0)
    assert (done.stdout, "step 50/50" in done.stderr) == ("a line\n", True)
    folder.record.write_text("{")
    done = llmb("jobs", "log", "4001", "--follow", code=0)
    assert (done.stdout, done.stderr) == ("a line\n", "")


def test_a_run_has_ended_in_a_history_that_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = replace(labeled(tmp_path, 1, 10.0, "queued"), state="PENDING")
    monkeypatch.setattr(follow, "current", lambda store, install, job, say: replace(job, status="success"))
    with open_history(tmp_path, print) as store:
        store.add([queued])
        store.lock_changes()
        assert asker(store, tmp_path, print)(queued).status == "success"

# SPDX-License-Identifier: Apache-2.0
"""Runs on this machine in the history: listed, waited for, cancelled, printed again, and detected when killed."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from called_here import MODULE, WITHIN_S, Run, environ_of
from slowed_runs import Slow, slowed

from llmb.jobs.history import database_path, open_history
from llmb.jobs.refresh import refresh
from llmb.launch.local import is_alive, this_process
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job, read_record, write_record

TINY = ("run", "-w", "pretrain_llama3.1", "-s", "tiny", "--gpu-type", "cpu", "--scale", "1")
# No command of Slurm is on this path.
BARE = "/nonexistent"


def jobs(llmb: Run) -> list[dict[str, Any]]:
    return llmb("jobs", "list", "--json", code=0, PATH=BARE).document["jobs"]


def begin(llmb: Run, install: Path, python: str) -> "tuple[subprocess.Popen[str], dict[str, Any]]":
    """A run that would last, once its first step is done, and its row."""
    command = [python, *MODULE, *TINY, "--steps", "10000"]
    environ = environ_of(install, **slowed(Slow("pace", ms=300)))
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, text=True)
    end = time.monotonic() + WITHIN_S
    while not [path for path in install.rglob("metrics.jsonl") if path.read_text().count("\n")]:
        assert process.poll() is None and time.monotonic() < end, "the run did not start"
        time.sleep(0.2)
    (row,) = jobs(llmb)
    return process, row


@pytest.mark.slow
def test_a_run_is_listed_and_its_result_printed_again(llmb: Run, llmb_program: Run, tmp_path: Path) -> None:
    done = llmb_program(tmp_path, *TINY, "--steps", "3", "--json")
    assert "history" not in done.stderr
    first = json.loads(done.stdout)
    (row,) = jobs(llmb)
    assert (row["scheduler"], row["state"], row["status"], row["exit_code"]) == ("local", "COMPLETED", "success", 0)
    assert row["job_id"].startswith("local-")
    assert row["step_time_s"] == first["step_time_s"]["mean"]
    again = json.loads(llmb("result", row["job_id"], "--json", PATH=BARE, code=0).stdout)
    assert again == first
    assert json.loads(llmb("result", str(Path(row["run_dir"]).parent), "--json", code=0).stdout) == first
    assert "step time s, mean" in llmb("result", row["run_dir"], code=0).stdout
    record = read_record(RunFolder(Path(row["run_dir"])))
    assert (record.program, record.job and record.job.job_id) == ("engine", row["job_id"])
    assert llmb("jobs", "wait", row["job_id"], PATH=BARE, code=0)
    assert "Training epoch" in llmb("jobs", "log", row["job_id"], PATH=BARE, code=0).stdout
    database_path(tmp_path).unlink()
    (rebuilt,) = json.loads(llmb("jobs", "rebuild", "--json", PATH=BARE, code=0).stdout)["jobs"]
    assert {**rebuilt, "checked_s": 0} == {**row, "checked_s": 0, "submitted_s": rebuilt["submitted_s"]}


@pytest.mark.slow
def test_a_run_that_lasts_is_cancelled_from_elsewhere(llmb: Run, tmp_path: Path, forked_python: str) -> None:
    process, row = begin(llmb, tmp_path, forked_python)
    assert (row["state"], row["status"]) == ("RUNNING", "running")
    llmb("result", row["job_id"], code=2)
    llmb("jobs", "wait", row["job_id"], "--timeout", "0", code=6)
    llmb("jobs", "cancel", row["job_id"], PATH=f"{BARE}:/bin:/usr/bin", code=0)
    assert process.wait(WITHIN_S) == 130
    (row,) = jobs(llmb)
    assert (row["state"], row["status"]) == ("CANCELLED", "cancelled")
    assert row["reason"].startswith("cancelled, after ")
    llmb("jobs", "wait", row["job_id"], code=130)
    assert "the run was cancelled: interrupted by SIGTERM" in llmb("result", row["job_id"], code=4).stderr


@pytest.mark.slow
def test_a_run_that_was_killed_is_found_out(llmb: Run, tmp_path: Path) -> None:
    process, row = begin(llmb, tmp_path, sys.executable)  # a process of its own, which is gone at once
    process.send_signal(signal.SIGKILL)
    process.wait(WITHIN_S)
    llmb("jobs", "refresh", PATH=BARE, code=0)
    (row,) = jobs(llmb)
    assert (row["state"], row["status"]) == ("KILLED", "failed")
    assert row["reason"].startswith("its process was killed, after ")
    assert row["reason"].endswith(f"; not concluded; run 'llmb result {row['id']}'")
    done = llmb("result", "latest", code=2, PATH=BARE)
    assert f"run {row['id']} ended without a result (KILLED); concluding it now" in done.stderr
    assert f"the newest are: {row['id']} is failed" in done.stderr
    llmb("result", row["id"], code=4, PATH=BARE)
    (again,) = jobs(llmb)
    assert again["reason"] == row["reason"].partition("; not concluded")[0]
    record = read_record(RunFolder(Path(row["run_dir"])))
    assert record.status == "failed"
    assert str(record.reason).startswith("interrupted by the system (KILLED) after ")


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_is_not_called_killed(llmb: Run, tmp_path: Path, forked_python: str) -> None:
    process, row = begin(llmb, tmp_path, forked_python)
    process.send_signal(signal.SIGKILL)
    process.wait(WITHIN_S)
    shutil.rmtree(Path(row["run_dir"]).parent)
    llmb("jobs", "refresh", PATH=BARE, code=0)
    (row,) = jobs(llmb)
    assert (row["state"], row["status"]) == ("UNKNOWN", "failed")
    assert row["reason"] == "the run folder was deleted, so the result of the run is unknown"


@pytest.mark.slow
def test_a_run_that_the_history_lacks_is_found_by_its_folder(llmb: Run, llmb_program: Run, tmp_path: Path) -> None:
    """And if its record says that it is running on another machine, it stays as it was and says so."""
    (tmp_path / ".llmb").write_text("a file, and no folder")
    done = llmb_program(tmp_path, *TINY, "--steps", "2", "--json")
    assert json.loads(done.stdout)["status"] == "success"
    assert "the history of jobs lacks this run" in done.stderr
    (tmp_path / ".llmb").unlink()
    (row,) = json.loads(llmb("jobs", "rebuild", "--json", PATH=BARE, code=0).stdout)["jobs"]
    assert (row["scheduler"], row["status"]) == ("local", "success")
    folder = RunFolder(Path(row["run_dir"]))
    record, handle = read_record(folder), read_job(folder)
    assert handle and handle.process
    write_record(folder, record.model_copy(update={"status": "running", "exit_code": None, "result": None}))
    elsewhere = handle.process.model_copy(update={"host": "elsewhere"})
    folder.job.write_text(handle.model_copy(update={"process": elsewhere}).model_dump_json())
    database_path(tmp_path).unlink()
    with open_history(tmp_path, lambda _: None) as store:
        refresh(store, tmp_path)
        (job,) = store.jobs()
    assert (job.status, job.state) == ("running", "UNKNOWN")
    assert job.reason == "it was started on elsewhere; whether it is still running can be checked only there"
    done = llmb("jobs", "cancel", str(job.job_id), code=2)
    assert f"run 'llmb jobs cancel {job.job_id}' on elsewhere" in done.stderr


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    mine = this_process()
    assert is_alive(mine)
    assert not is_alive(mine.model_copy(update={"started": "1 another boot"}))
    child = subprocess.Popen(["true"])
    child.wait()
    assert not is_alive(mine.model_copy(update={"pid": child.pid}))

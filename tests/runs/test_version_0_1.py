# SPDX-License-Identifier: Apache-2.0
"""An install root as version 0.1 left it, small: it is listed, shown, parsed and made a history of again.

``data/version-0.1`` holds what was below /cluster/bench: runs on Slurm (one retried, an array, one that waits, two
of a campaign, one of Megatron-Bridge), a run on a machine with a checkpoint, and the history as SQL. Weights are left
out.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.checkpoint_report import report_checkpoints
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job, read_record

DATA = Path(__file__).resolve().parents[1] / "data" / "version-0.1"
PLACE = "/cluster/bench"
KEYS = ["retried", "array.0", "array.1", "array.2", "held"]


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """The install root at another place, with the history that it had."""
    root = tmp_path / "bench"
    shutil.copytree(DATA, root)
    (root / "llmb").rename(root / ".llmb")
    for path in [path for path in root.rglob("*") if path.is_file()]:
        path.write_text(path.read_text().replace(PLACE, str(root)))
    history = root / ".llmb" / "jobs.sql"
    with sqlite3.connect(root / ".llmb" / "jobs.sqlite") as database:
        database.executescript(history.read_text())
    database.close()
    history.unlink()
    return root


def llmb(install: Path, *command: str) -> Any:
    # Without Slurm: what an install root holds can be read anywhere.
    environ = {**os.environ, "LLMB_INSTALL": str(install), "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-m", "llmb.cli.main", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def runs_of(install: Path) -> list[RunFolder]:
    return [RunFolder(path.parent) for path in sorted(install.glob("workloads/*/experiments/*/*/*/run.json"))]


def test_jobs_are_listed_and_shown(install: Path) -> None:
    jobs = {job["key"]: job for job in llmb(install, "jobs", "list", "--no-refresh", "--json")["jobs"]}
    assert set(KEYS) < set(jobs)
    assert [jobs[key]["status"] for key in KEYS] == ["failed", "success", "failed", "success", "queued"]
    assert (jobs["retried"]["fault"], jobs["retried"]["bad_nodes"]) == ("nccl_system_error", "node1")
    assert (jobs["retried#2"]["retry_of"], jobs["retried#2"]["step_time_s"]) == ("retried", 0.5)
    assert (jobs["bridge"]["state"], jobs["bridge"]["workload"]) == ("COMPLETED", "finetune_llama3")
    shown = llmb(install, "jobs", "show", jobs["retried#2"]["job_id"], "--json")
    assert [attempt["job"]["nodes"] for attempt in shown["attempts"]] == ["node1", "node2"]
    assert llmb(install, "jobs", "show", "2_1", "--json")["last_lines"]


def test_records_are_read(install: Path) -> None:
    runs = runs_of(install)
    assert len(runs) == 8
    for folder in runs:
        record = read_record(folder)
        assert record.llmb_version == "0.1.0"
        assert record.plan.steps in (3, 4, 10, 20)
        handle = read_job(folder)
        assert handle is None or handle.scheduler == "slurm"
    (checkpoint,) = install.rglob("checkpoint.json")
    assert read_checkpoint(checkpoint.parent).record.step == 4


def test_times_of_saves_are_read_from_a_log_where_nothing_else_has_them(install: Path) -> None:
    (checkpoint,) = install.rglob("checkpoint.json")
    folder = RunFolder(checkpoint.parents[2])
    report = report_checkpoints(folder, read_record(folder).plan, [])
    assert report and report.save_s == (0.915, 0.613)


def test_logs_are_parsed(install: Path) -> None:
    report = llmb(install, "parse", str(install), "--format", "json")
    texts = json.dumps(report)
    assert "lora_llama3_70b" in texts and "pretrain_llama3.1_tiny_fp32_gpus2" in texts


def test_a_history_that_is_lost_is_made_again(install: Path) -> None:
    before = {job["key"]: job for job in llmb(install, "jobs", "list", "--no-refresh", "--json")["jobs"]}
    (install / ".llmb" / "jobs.sqlite").unlink()
    after = {job["key"]: job for job in llmb(install, "jobs", "rebuild", "--json")["jobs"]}
    # The folder of one task of the array is not among the data.
    assert set(after) == set(before) - {"array.2"}
    same = ("job_id", "run_dir", "workload", "size", "scale", "campaign", "retries", "retry_of")
    for key, job in after.items():
        assert {name: job[name] for name in same} == {name: before[key][name] for name in same}

# SPDX-License-Identifier: Apache-2.0
"""Jobs that the controller of a real Slurm has forgotten, and its accounts know."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_accounts import ACCOUNT, ClusterWithAccounts
from slurm_client import Client, up, wait_until

from llmb.jobs.job import Job
from llmb.jobs.refresh import refresh
from llmb.jobs.store import Store
from llmb.runs.folder import RunFolder

pytestmark = pytest.mark.slurm
Submit = Callable[..., Job]
ALL_STEPS = 'cat "$1" >> "$0/metrics.jsonl"'
HALF = 'head -n 5 "$1" >> "$0/metrics.jsonl"'
WAIT = "echo up; exec sleep 300"
BY_ME = f"cancelled by user {os.geteuid()}"
ONCE_AGAIN = f'if [ -z "$SLURM_RESTART_COUNT" ]; then scontrol requeue "$SLURM_JOB_ID"; {WAIT}; fi; {ALL_STEPS}'


@pytest.fixture
def slurm(slurm_with_accounts: ClusterWithAccounts) -> ClusterWithAccounts:
    """In place of the one without accounts."""
    return slurm_with_accounts


@pytest.mark.slow
def test_accounts_alone_tell_how_forgotten_jobs_ended(
    submit: Submit, store: Store, shell: Client, slurm: ClusterWithAccounts
) -> None:
    killed = submit(f"{HALF}; {WAIT}", "killed")
    up(killed)
    refresh(store, shell.install)
    again, cancelled = submit(ONCE_AGAIN, "again", retries=1), submit(WAIT, "cancelled")
    runaway, failed = submit(ALL_STEPS, "runaway"), submit(f"{HALF}; exit 3", "failed")
    through = submit(ALL_STEPS, "through")
    up(cancelled)
    slurm.run("scancel", str(cancelled.job_id))
    wait_until(lambda: slurm.run("squeue", "-h", "-o", "%i").stdout.split() == [killed.job_id], slurm.talk())
    accounted = ("sacct", "-X", "-n", "-P", "-o", "State", "-j", str(runaway.job_id))
    wait_until(lambda: slurm.run(*accounted).stdout.strip() == "COMPLETED", slurm.talk())

    slurm.end("slurmdbd")
    slurm.lose_the_end_of(str(runaway.job_id))
    slurm.run("scancel", "--signal=KILL", "--full", str(killed.job_id))
    wait_until(lambda: not slurm.run("squeue", "-h", "-t", "all").stdout, slurm.talk())
    mark = RunFolder(Path(runaway.run_dir)).job_end
    mark.rename(mark.with_name("kept"))
    for job in (killed, again):  # as where a node was lost with its job
        RunFolder(Path(job.run_dir)).job_end.unlink(missing_ok=True)
    for job in (cancelled, failed):
        shutil.rmtree(job.run_dir)
    assert "Problem talking to the database" in shell.run("jobs", "refresh").stderr
    assert {job.key: (job.state, job.status) for job in store.jobs()} == {
        "killed": ("RUNNING", "running"),
        "through": ("COMPLETED", "success"),  # its mark is as good
        **dict.fromkeys(("again", "cancelled", "failed", "runaway"), ("PENDING", "queued")),
    }

    slurm.start_accounting_daemon()  # it hears of the last jobs some seconds later

    def told() -> list[str]:
        shell.run("jobs", "refresh")
        return [job.key for job in store.live()]

    wait_until(lambda: told() == ["runaway"], slurm.talk())
    assert store.live()[0].status == "queued", "the controller forgot it, so it does not run"
    mark.with_name("kept").rename(mark)
    assert told() == []
    names = ("state", "status", "exit_code", "reason", "restarts", "step_time_s")
    assert {job["job_id"]: tuple(job[name] for name in names) for job in shell.json("jobs", "list")["jobs"]} == {
        killed.job_id: ("CANCELLED", "cancelled", 0, f"{BY_ME}, after 5 of 10 steps", 0, None),
        again.job_id: ("COMPLETED", "success", 0, None, 1, 0.05),
        cancelled.job_id: ("CANCELLED", "cancelled", 0, BY_ME, 0, None),
        through.job_id: ("COMPLETED", "success", 0, None, 0, 0.05),
        runaway.job_id: ("COMPLETED", "success", 0, None, 0, 0.05),
        failed.job_id: ("FAILED", "failed", 3, "the batch script ended with exit code 3", 0, None),
    }
    assert len(store.jobs()) == 6
    assert len(shell.json("jobs", "show", str(again.job_id))["attempts"]) == 2
    for job in store.jobs():
        if job.key not in ("through", "runaway"):
            assert job.submitted_s - 1 <= (job.started_s or 0) <= (job.ended_s or 0) <= time.time(), job
            assert job.nodes in ("node1", "node2")


@pytest.mark.slow
def test_only_known_accounts_are_charged(client: Client) -> None:
    options = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--slurm-arg", "hold")
    done = client.run("submit", *options, "--account", "nobody", code=2)
    assert "Slurm rejected the job" in done.stderr
    assert "Invalid account" in done.stderr
    assert client.json("jobs", "list")["total"] == 0
    job = client.submit("--slurm-arg", "hold", "--account", ACCOUNT, scale=1)
    charged = client.cluster.run("squeue", "-h", "-j", job["job_id"], "-o", "%a")
    assert charged.stdout.strip() == ACCOUNT

# SPDX-License-Identifier: Apache-2.0
"""``llmb watch`` of jobs of a real Slurm, with a line of shell in place of the workers."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_client import LLMB, Client, wait_until

from llmb.jobs.job import Job
from llmb.runs.folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Submit = Callable[..., Job]
STEPS = '"$1" >> "$0/metrics.jsonl"'
IN_TWO_PARTS = f'head -n 5 {STEPS}; while ! test -e "$0/go"; do sleep 0.2; done; tail -n 5 {STEPS}'


def watching(client: Client, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [client.python, *LLMB, "watch", *options],
        env={**client.cluster.environ, "LLMB_INSTALL": str(client.install)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(watcher: "subprocess.Popen[str]", beginning: str) -> list[str]:
    assert watcher.stderr
    seen = []
    while not (seen and seen[-1].startswith(f"llmb: {beginning}")):
        line = watcher.stderr.readline()
        assert line, (seen, watcher.stdout and watcher.stdout.read())
        seen.append(line)
    return seen


def test_a_job_is_watched_from_the_queue_to_its_end(submit: Submit, shell: Client) -> None:
    job = submit(IN_TWO_PARTS)
    watcher = watching(shell, str(job.job_id), "--expect", "0.1")
    read_until(watcher, "step 5/10 ")
    (Path(job.run_dir) / "go").touch()
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 0, (out, err)
    assert "step 10/10 " in err and "step time s, mean" in out
    document = shell.json("watch", str(job.job_id))
    assert (document["nodes"], document["result"]["status"]) == ("node1", "success")


def test_a_job_that_is_held_and_then_cancelled(submit: Submit, shell: Client) -> None:
    job = submit(IN_TWO_PARTS, flags={"hold": None})
    before = shell.json("watch", str(job.job_id), "--once")
    assert (before["state"], before["steps_done"]) == ("queued", 0)
    assert "held" in before["reason"]
    watcher = watching(shell)
    read_until(watcher, "queued")
    shell.cluster.run("scancel", str(job.job_id))
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 130, (out, err)
    assert "cancelled" in err


def test_the_time_limit_of_a_job(submit: Submit, shell: Client) -> None:
    job = submit(f"head -n 5 {STEPS}; exec sleep 300", flags={"time": "5"})
    steps = RunFolder(Path(job.run_dir)).steps
    wait_until(lambda: steps.exists() and steps.read_text().count("\n") == 5, job.run_dir)
    seen = shell.json("watch", str(job.job_id), "--once")
    assert 0 < seen["time_limit_left_s"] <= 300
    assert (seen["state"], seen["steps_done"], seen["steps_total"]) == ("running", 5, 10)

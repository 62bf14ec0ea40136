# SPDX-License-Identifier: Apache-2.0
"""``llmb`` as a user of a cluster calls it."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import SlurmCluster

from llmb.jobs.job import Job
from llmb.jobs.refresh import refresh
from llmb.jobs.store import Store
from llmb.runs.folder import RunFolder

LLMB = ["-m", "llmb.cli.main"]
SETTINGS = """\
gpu_type: cpu
environment: {GLOO_SOCKET_IFNAME: lo, OMP_NUM_THREADS: 1}
slurm: {partition: gpu, gpus_per_node: 2}
"""
WITHIN_S = 600


@dataclass
class Client:
    """``llmb`` as a user of the test cluster calls it, with an install root of the test's own."""

    cluster: SlurmCluster
    install: Path
    python: str
    """What runs ``llmb`` and, in jobs, the workers."""

    def run(self, *command: str, code: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.python, *LLMB, *command],
            env={**self.cluster.environ, "LLMB_INSTALL": str(self.install), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *command: str, code: int | None = 0, **variables: str) -> Any:
        return json.loads(self.run(*command, "--json", code=code, **variables).stdout)

    def submit(self, *options: str, scale: int = 2) -> dict[str, Any]:
        """The only job of ``llmb submit`` for a tiny model on CPU processes."""
        (job,) = self.json("submit", "-w", "pretrain_llama3.1", "-s", "tiny", "--scale", str(scale), *options)["jobs"]
        return job

    def wait_for_steps(self, run_dir: str, count: int) -> None:
        steps = Path(run_dir) / "metrics.jsonl"
        wait_until(lambda: steps.exists() and steps.read_text().count("\n") >= count, f"{count} steps in {run_dir}")


def ended(store: Store, client: Client, key: str) -> Job:
    """The job once it has ended; retries are left alone."""

    def over() -> Job | None:
        refresh(store, client.install)
        return next((job for job in store.jobs() if job.key == key and not job.live), None)

    wait_until(lambda: over() is not None, f"the end of {key}\n{client.cluster.talk()}")
    job = over()
    assert job
    return job


def run_out_of_time(cluster: SlurmCluster, *job_ids: str) -> None:
    """Slurm ends the jobs at their time limit. It looks for such jobs twice a minute, by a clock that may go back."""
    jobs = ",".join(job_ids)

    def out() -> bool:
        cluster.run("scontrol", "update", f"jobid={jobs}", "EndTime=now")
        return not cluster.run("squeue", "-h", "-t", "running", "-j", jobs).stdout.strip()

    wait_until(out, f"the end of {jobs} at the time limit\n{cluster.talk()}", between_s=5)


def up(job: Job) -> None:
    """Waits until the shell line of a job has said so."""
    log = RunFolder(Path(job.run_dir)).log
    wait_until(lambda: log.exists() and "up" in log.read_text().splitlines(), job.run_dir)


def wait_until(true: Callable[[], bool], what: str, within_s: float = WITHIN_S, between_s: float = 0.1) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(between_s)

# SPDX-License-Identifier: Apache-2.0
"""Campaigns on a real Slurm, with clients that are killed. What the jobs run is a script that does nothing."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import SEARCHED, SlurmCluster

pytestmark = pytest.mark.slurm
WITHIN_S = 600
TINY = ("pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick")


class Client:
    """``llmb`` on the test cluster, with an install root and programs of its own."""

    def __init__(self, slurm: SlurmCluster, folder: Path, python: str) -> None:
        self.python = python
        self.slurm = slurm
        self.install = folder / "install"
        self.programs = folder / "bin"
        self.install.mkdir()
        self.programs.mkdir()
        self.write_program("nothing", "exit 0")
        config = f"gpu_type: cpu\npython: {self.programs}/nothing\nslurm: {{partition: gpu, gpus_per_node: 1}}\n"
        (self.install / "cluster_config.yaml").write_text(config)

    def write_program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        path = f"{self.programs}:{SEARCHED}"
        environ = {**self.slurm.environ, "PATH": path, "LLMB_INSTALL": str(self.install)}
        return subprocess.Popen(
            [self.python, "-m", "llmb.cli.main", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=WITHIN_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def queued(self) -> list[str]:
        """The scripts of all jobs of this install root that the cluster has seen."""
        listed = self.slurm.run("squeue", "-h", "-r", "-t", "all", "-o", "%o").stdout.splitlines()
        return [script for script in listed if script.startswith(f"{self.install}/")]

    def campaign(self) -> dict[str, object]:
        (path,) = (self.install / ".llmb" / "campaigns").glob("*.json")
        return json.loads(path.read_text())

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < end, what
            time.sleep(0.02)


@pytest.fixture
def client(slurm: SlurmCluster, tmp_path: Path, forked_python: str) -> Iterator[Client]:
    made = Client(slurm, tmp_path, forked_python)
    yield made
    slurm.run("scancel", "--me")
    made.wait_until("an empty queue", lambda: not slurm.run("squeue", "-h").stdout.strip())


def killed(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=WITHIN_S)
    return err


def until(file: Path) -> str:
    """A line of shell that waits for a file."""
    return f"while [ ! -e {file} ]; do sleep 0.1; done"


def states(campaign: dict[str, object]) -> Counter[str]:
    return Counter(job["state"] for job in campaign["jobs"])


def test_a_job_that_slurm_got_is_found_again(client: Client) -> None:
    """The client is killed when Slurm has the job and its id is not yet written."""
    go_on = client.install / "go_on"
    client.write_program("sbatch", f'PATH={SEARCHED} sbatch "$@"; {until(go_on)}')
    command = ("submit", "-w", TINY[0], "-s", "tiny", "--scale", "1", "--repeats", "2", "--yes", "--steps", "1")
    process = client.start(*command)
    client.wait_until("a job", lambda: len(client.queued()) == 1)
    killed(process)
    assert states(client.campaign()) == {"submitting": 1, "planned": 1}
    go_on.touch()
    assert client.call(*command).returncode == 0
    assert len(client.queued()) == 2
    assert states(client.campaign()) == {"submitted": 2}


@pytest.mark.slow
def test_what_a_killed_client_left_behind_is_waited_for(client: Client) -> None:
    """The client is killed, and the sbatch that it started only then gets to Slurm."""
    marker, go_on = client.install / "asked", client.install / "go_on"
    client.write_program("sbatch", f'touch {marker}; {until(go_on)}; sleep 3; PATH={SEARCHED} exec sbatch "$@"')
    command = ("submit", "-w", TINY[0], "-s", "tiny", "--scale", "1", "--repeats", "2", "--yes", "--steps", "1")
    process = client.start(*command)
    client.wait_until("sbatch", marker.exists)
    killed(process)
    assert client.queued() == []
    go_on.touch()
    assert client.call(*command).returncode == 0
    assert len(client.queued()) == 2


@pytest.mark.measured
def test_a_job_that_slurm_never_got_is_submitted_again(client: Client) -> None:
    """The client and its sbatch are both gone before Slurm hears of the job."""
    marker = client.install / "asked"
    client.write_program("sbatch", f"echo $$ >{marker}; exec sleep 600")
    command = ("submit", "-w", TINY[0], "-s", "tiny", "--scale", "1", "--repeats", "2", "--yes", "--steps", "1")
    process = client.start(*command)
    client.wait_until("sbatch", lambda: marker.exists() and marker.read_text().strip() != "")
    killed(process)
    subprocess.run(["kill", "-KILL", marker.read_text().strip()], check=True)
    (client.programs / "sbatch").unlink()
    again = client.call(*command)
    assert again.returncode == 0
    assert "interrupted before it reached Slurm" in again.stderr
    scripts = client.queued()
    assert len(set(scripts)) == len(scripts) == 2
    assert {job["folder"] for job in client.campaign()["jobs"]} == {str(Path(script).parent) for script in scripts}


def test_two_clients_at_once_queue_one_campaign(client: Client) -> None:
    go_on = client.install / "go_on"
    client.write_program("sbatch", f'{until(go_on)}; PATH={SEARCHED} exec sbatch "$@"')
    command = ("submit", "-w", TINY[0], "-s", "tiny", "--scale", "1,2", "--repeats", "3", "--yes", "--steps", "1")
    both = [client.start(*command), client.start(*command)]
    for process in both:  # if one had ended before the other looks for such campaigns, that one would be rejected
        assert process.stderr
        assert any(line.startswith("campaign ") for line in process.stderr)
    go_on.touch()
    ends = [process.communicate(timeout=WITHIN_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert len(client.queued()) == 6
    assert states(client.campaign()) == {"submitted": 6}


def test_what_slurm_refuses_is_told_and_tried_again(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "jobs.txt"
    file.write_text(f"{TINY[0]} tiny fp32 1 steps=1\n{TINY[1]} tiny fp32 1 steps=1 partition=nowhere\n")
    first = client.call("bulk", str(file), "--yes")
    assert first.returncode == 2
    assert "1 of 2 jobs could not be queued" in first.stderr
    assert "partition" in first.stderr
    assert states(client.campaign()) == {"submitted": 1, "refused": 1}
    client.slurm.run("scontrol", "create", "partition=nowhere", "nodes=node1")
    try:
        second = client.call("bulk", str(file), "--yes", "--json")
        assert second.returncode == 0, second.stderr
        assert len(client.queued()) == 2
        assert {job["state"] for job in json.loads(second.stdout)["jobs"]} == {"submitted"}
        third = client.call("bulk", str(file), "--resume", "--yes")
        assert third.returncode == 2
        assert "there is no unfinished campaign from this source" in third.stderr
    finally:
        client.slurm.run("scancel", "--me")
        client.slurm.run("scontrol", "delete", "partition=nowhere")

# SPDX-License-Identifier: Apache-2.0
"""Runs on a real Slurm, from ``llmb submit`` to the result."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm
Submit = Callable[..., "subprocess.CompletedProcess[str]"]
TWO_NODES = ("--scale", "4", "--steps", "5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "forked"),
    [
        *(("torchrun", True), ("task-per-gpu", True)),
        *(pytest.param(start, False, marks=pytest.mark.measured) for start in ("torchrun", "task-per-gpu")),
    ],
)
def test_a_run_on_two_nodes_comes_back_with_its_result(
    submit: Submit, slurm: SlurmCluster, forked_python: str, start: str, forked: bool
) -> None:
    python = forked_python if forked else sys.executable
    done = submit(*TWO_NODES, "--start", start, "--wait", "--json", python=python)
    assert done.returncode == 0, done.stderr + slurm.talk()
    result = json.loads(done.stdout)
    assert result["status"] == "success"
    assert result["steps"] == 5
    folder = Path(result["run_dir"])
    record = json.loads((folder / "run.json").read_text())
    assert record["exit_code"] == 0
    assert record["job"]["nodes"] == "node[1-2]"
    variables = record["environment"]["variables"]
    assert record["environment"]["ranks_per_node"] and variables["SLURM_JOB_ID"] == record["job"]["job_id"]
    handle = json.loads((folder / "job.json").read_text())
    end = json.loads((folder / "job_end.json").read_text())
    assert handle["job_id"] == record["job"]["job_id"] == end["job_id"]
    assert (end["exit_code"], end["signal"], end["restarts"]) == (0, "", 0)
    sampled = {path.stem for path in (folder / "resources").iterdir()}
    assert sampled == set(record["environment"]["nodes"]) == {"node1", "node2"}
    log = (folder / f"log-{folder.name}.out").read_text()
    assert [line.split()[4] for line in log.splitlines() if line.startswith("Training epoch")] == [
        f"{step}/4" for step in range(5)
    ]
    assert re.search(
        rf"JobState=COMPLETED .*WorkDir={folder}", slurm.run("scontrol", "-o", "show", "job", handle["job_id"]).stdout
    )


@pytest.mark.slow
def test_a_worker_that_fails_gives_its_last_lines(submit: Submit, forked_python: str) -> None:
    done = submit(*TWO_NODES, "--env", "GLOO_SOCKET_IFNAME=nosuch0", "--wait", "--json", python=forked_python)
    assert done.returncode == 4, done.stderr
    assert "the run failed: rank" in done.stderr
    assert "nosuch0" in done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "failed"
    assert "rank" in result["reason"]
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["exit_code"] != 0


def test_what_is_shown_is_what_is_queued(submit: Submit, slurm: SlurmCluster, tmp_path: Path) -> None:
    options = (*TWO_NODES, "--slurm-arg", "hold", "--slurm-arg", "comment=it's $(x)", "--nice", "3", "--env", "A=b c")
    shown = submit(*options, "--dry-run")
    assert shown.returncode == 0
    assert not (tmp_path / "install" / "workloads").exists()
    queued = submit(*options, "--json", ADDITIONAL_SLURM_PARAMS="")
    assert queued.returncode == 0, queued.stderr
    (job,) = json.loads(queued.stdout)["jobs"]
    try:
        folder = Path(job["run_dir"])
        stamp = folder.parent.name.rpartition("_")[2]
        assert Path(job["script"]).read_text() == shown.stdout.replace("_SECONDS/", f"_{stamp}/")
        assert (
            slurm.run("scontrol", "write", "batch_script", job["job_id"], "-").stdout == Path(job["script"]).read_text()
        )
        assert json.loads((folder / "run.json").read_text())["status"] == "queued"
    finally:
        slurm.run("scancel", job["job_id"])

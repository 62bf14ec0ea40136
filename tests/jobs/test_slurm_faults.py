# SPDX-License-Identifier: Apache-2.0
"""A node is lost under a real run on a real Slurm, and the run resumes from its checkpoint."""

import json
from pathlib import Path

import pytest
from slowed_runs import Slow, slowed
from slurm_client import Client

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TINY = ("-w", "pretrain_llama3.1", "-s", "tiny")
OPTIONS = ("--steps", "10", "--checkpoint-interval", "4", "--gpus-per-node", "1")


def losses(path: Path) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in map(json.loads, path.read_text().splitlines())}


def test_a_run_whose_node_is_lost_goes_on_from_its_checkpoint(client: Client) -> None:
    # So that the node is lost some steps behind a checkpoint, and before the next one.
    pace = slowed(Slow("pace", ms=1000))
    (job,) = client.json("submit", *TINY, "--scale", "2", *OPTIONS, "--retries", "2", **pace)["jobs"]
    client.wait_for_steps(job["run_dir"], 6)
    client.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    (ended,) = client.json("jobs", "wait", job["job_id"])["jobs"]
    assert (ended["state"], ended["status"], ended["restarts"]) == ("COMPLETED", "success", 1)
    run = Path(job["run_dir"])
    record = json.loads((run / "run.json").read_text())
    first, second = record["attempts"]
    assert (first["number"], second["number"], second["job"]["restarts"]) == (1, 2, 1)
    assert second["first_step"] in (4, 8)
    assert sorted(record["environment"]["nodes"]) == ["node1", "node2"]
    after, before = losses(run / "metrics.jsonl"), losses(run / "metrics-attempt1.jsonl")
    assert list(after) == list(range(10))
    assert max(before) >= second["first_step"], "something was done twice"
    assert {number: after[number] for number in before} == before
    log = (run / f"log-{run.name}.out").read_text()
    assert log.count("iteration 0/9") == 1
    assert f"llmb: attempt 2 begins at step {second['first_step']} on node[1-2]" in log

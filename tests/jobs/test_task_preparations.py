# SPDX-License-Identifier: Apache-2.0
"""Jobs that prepare something, on a real Slurm: states, logs, rows in the history, and runs on what they made."""

import json
from pathlib import Path

import pytest
from slurm_client import Client
from small_finetuning import write_small_finetuning

pytestmark = pytest.mark.slurm
WORKLOAD = "finetune_llama3"
MODEL = ("--checkpoint-source", "/data/model")


def with_command(client: Client, script: str) -> None:
    """The nodes' interpreter is a shell script, so that a job does what the test wants."""
    python = client.install / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    settings = client.install / "cluster_config.yaml"
    settings.write_text(f"{settings.read_text()}python: {python}\n")


def submitted(client: Client, *options: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = client.json("prepare", "submit", "-w", WORKLOAD, "-s", "tiny", *MODEL, *options)[
        "jobs"
    ]
    return found


@pytest.mark.slow
def test_both_parts_are_jobs_of_the_history(client: Client) -> None:
    with_command(client, 'echo "called with: $*"; echo "root $LLMB_INSTALL, cores $SLURM_CPUS_PER_TASK"')
    dataset, checkpoint = submitted(client, "--gpus-per-node", "1")
    rows = client.json("jobs", "wait", dataset["job_id"], checkpoint["job_id"])["jobs"]
    found = [(row["subject"], row["status"], row["state"], row["dtype"], row["scale"]) for row in rows]
    assert found == [("dataset", "success", "COMPLETED", "", 1), ("checkpoint", "success", "COMPLETED", "", 1)]
    log = client.run("jobs", "log", dataset["job_id"]).stdout
    assert (
        f"called with: -P -m llmb.cli.main prepare dataset -w {WORKLOAD} -s tiny --tokenizer /data/model --seq-len 128"
        in log
    )
    assert f"root {client.install}, cores 8" in log
    table = client.run("jobs", "list").stdout
    assert f"{WORKLOAD} tiny" in table
    shown = client.json("jobs", "show", checkpoint["job_id"])
    assert shown["files"]["log"].endswith("log-prepare_checkpoint_tiny.out")
    assert "synthetic" not in table + client.run("jobs", "show", checkpoint["job_id"]).stdout
    assert client.json("jobs", "nodes")["nodes"] == [], "they say nothing of a node's speed"
    (client.install / ".llmb" / "jobs.sqlite").unlink()
    again = client.json("jobs", "rebuild")["jobs"]
    assert {(row["job_id"], row["subject"], row["status"]) for row in again} == {
        (row["job_id"], row["subject"], "success") for row in rows
    }


@pytest.mark.measured
def test_what_is_being_prepared_is_not_submitted_again_and_can_be_cancelled(client: Client) -> None:
    with_command(client, "echo working; exec sleep 600")
    (job,) = submitted(client, "--skip-dataset")
    again = client.run("prepare", "submit", "-w", WORKLOAD, "-s", "tiny", *MODEL, "--skip-dataset", "--json")
    assert json.loads(again.stdout) == {"jobs": []}
    assert f"the checkpoint is already being prepared by job {job['job_id']}" in again.stderr
    client.run("jobs", "cancel", job["job_id"])
    (row,) = client.json("jobs", "wait", job["job_id"], code=None)["jobs"]
    assert (row["status"], row["subject"]) == ("cancelled", "checkpoint")
    assert submitted(client, "--skip-dataset"), "an ended job does not hinder the next"


LORA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"


@pytest.mark.parametrize("workload", [LORA, MAVERICK])
@pytest.mark.measured
def test_a_launch_trains_on_what_jobs_prepared(workload: str, client: Client, tmp_path: Path) -> None:
    samples, model = write_small_finetuning(tmp_path, workload)
    sources = ("--dataset-source", str(samples), "--checkpoint-source", str(model))
    jobs = client.json("prepare", "submit", workload, "-s", "tiny", *sources)["jobs"]
    ended = client.json("jobs", "wait", *(job["job_id"] for job in jobs))["jobs"]
    assert [(row["subject"], row["status"]) for row in ended] == [("dataset", "success"), ("checkpoint", "success")]
    assert client.json("prepare", "verify", "-w", workload, "-s", "tiny")["complete"]
    # How far the loss falls in all steps is tests/end_to_end/test_prepared_finetuning.py's.
    variables = {"JOB_TOTAL_GPUS": "2", "MODEL_SIZE": "tiny", "MAX_STEPS": "5"}
    result = client.json("launch", workload, "--wait", **variables)
    assert (result["status"], result["steps"]) == ("success", 5)
    assert 6.5 < result["loss"]["first"] < 7.5
    assert result["origin"]["weights"]["kind"] == "checkpoint"
    assert result["origin"]["data"]["name"] == "squad-tiny packed 128"

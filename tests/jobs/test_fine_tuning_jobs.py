# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on a real Slurm: prepared by jobs, launched by the documents' variables, resumed after a kill."""

from pathlib import Path

import pytest
from slurm_client import Client
from small_finetuning import write_small_finetuning

pytestmark = [pytest.mark.slurm, pytest.mark.measured]

LORA, MAVERICK = "finetune_llama3", "finetune_llama4-maverick"


@pytest.mark.parametrize("workload", [LORA, MAVERICK])
def test_a_launch_trains_on_what_jobs_prepared(workload: str, client: Client, tmp_path: Path) -> None:
    samples, model = write_small_finetuning(tmp_path, workload)
    sources = ("--dataset-source", str(samples), "--checkpoint-source", str(model))
    jobs = client.json("prepare", "submit", workload, "-s", "tiny", *sources)["jobs"]
    ended = client.json("jobs", "wait", *(job["job_id"] for job in jobs))["jobs"]
    assert [(row["subject"], row["status"]) for row in ended] == [("dataset", "success"), ("checkpoint", "success")]
    assert client.json("prepare", "verify", "-w", workload, "-s", "tiny")["complete"]
    # How far the loss falls in all steps is tests/prepare/test_end_to_end.py's.
    variables = {"JOB_TOTAL_GPUS": "2", "MODEL_SIZE": "tiny", "MAX_STEPS": "5"}
    result = client.json("launch", workload, "--wait", **variables)
    assert (result["status"], result["steps"]) == ("success", 5)
    assert 6.5 < result["loss"]["first"] < 7.5
    assert result["origin"]["weights"]["kind"] == "checkpoint"
    assert result["origin"]["data"]["name"] == "squad-tiny packed 128"

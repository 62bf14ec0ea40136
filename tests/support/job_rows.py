# SPDX-License-Identifier: Apache-2.0
"""Rows of the history of jobs, without jobs."""

from llmb.jobs.job import Job


def job_row(key: str = "a", **changes: object) -> Job:
    """A job that is about to be submitted, where ``changes`` say nothing else."""
    usual: dict[str, object] = {
        "key": key,
        "run_dir": "/runs/e/e_1/e",
        "experiment": "e",
        "workload": "pretrain_llama3.1",
        "size": "tiny",
        "scheduler": "slurm",
        "dtype": "fp32",
        "gpu_type": "cpu",
        "scale": 2,
        "submitted_s": 1.0,
    }
    return Job(**(usual | changes))  # type: ignore[arg-type]

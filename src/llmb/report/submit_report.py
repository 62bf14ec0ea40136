# SPDX-License-Identifier: Apache-2.0
"""Queued jobs, for people and as a JSON document."""

from collections.abc import Mapping
from typing import Any

from llmb.runs.folder import RunFolder
from llmb.runs.record import SubmittedJob


def submit_document(runs: Mapping[RunFolder, SubmittedJob]) -> dict[str, Any]:
    """The JSON of ``llmb submit``; its keys are a contract."""
    return {
        "jobs": [
            {
                "job_id": job.job_id,
                "cluster": job.cluster,
                "run_dir": str(folder.path),
                "script": str(folder.batch_script),
                "submitted_at": job.submitted_at,
            }
            for folder, job in runs.items()
        ]
    }


def submit_text(runs: Mapping[RunFolder, SubmittedJob]) -> str:
    return "".join(f"{job.job_id}  {folder.path}\n" for folder, job in runs.items())


def flags_text(flags: Mapping[str, str | None]) -> str:
    """The resources of a job on one line, before it is queued."""
    shown = ("nodes", "gpus-per-node", "gres", "time", "account", "partition", "qos", "reservation", "array")
    return ", ".join(f"{name} {flags[name]}" for name in shown if flags.get(name))

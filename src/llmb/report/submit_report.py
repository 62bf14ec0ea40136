# SPDX-License-Identifier: Apache-2.0
"""Queued jobs, for people and as a JSON document."""

from collections.abc import Mapping
from typing import Any

from llmb.jobs.order import Order
from llmb.report.recipe_report import identity_document, origin_document
from llmb.runs.folder import RunFolder
from llmb.runs.origin import Origin
from llmb.runs.record import SubmittedJob


def script_document(order: Order, script: str) -> dict[str, Any]:
    """The JSON of a dry run; its keys are a contract."""
    return {
        **identity_document(order.plan.recipe),
        "origin": origin_document(order.plan.origin),
        "not_prepared": order.missing and order.missing.what,
        "script": script,
    }


def submit_document(origin: Origin, runs: Mapping[RunFolder, SubmittedJob]) -> dict[str, Any]:
    """The JSON of ``llmb submit``; its keys are a contract."""
    return {"origin": origin_document(origin), **queued_document(runs)}


def queued_document(runs: Mapping[RunFolder, SubmittedJob]) -> dict[str, Any]:
    """Jobs that were queued, also those that prepare something."""
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
        ],
    }


def submit_text(runs: Mapping[RunFolder, SubmittedJob]) -> str:
    return "".join(f"{job.job_id}  {folder.path}\n" for folder, job in runs.items())


def flags_text(flags: Mapping[str, str | None]) -> str:
    """The resources of a job on one line, before it is queued."""
    shown = ("nodes", "gpus-per-node", "gres", "time", "account", "partition", "qos", "reservation", "array")
    return ", ".join(f"{name} {flags[name]}" for name in shown if flags.get(name))

# SPDX-License-Identifier: Apache-2.0
"""Jobs before and after they are queued, and campaigns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmb.campaigns.campaign import Campaign, PlannedJob, total, total_gpu_hours
from llmb.checkpoints.origin import Origin
from llmb.jobs.job import Job
from llmb.jobs.order import Order
from llmb.report.recipe_report import identity_document
from llmb.report.table import Column, Table, number, number_column, table_of
from llmb.runs.folder import RunFolder


def script_document(order: Order, script: str) -> dict[str, Any]:
    """The JSON of a dry run; its keys are a contract."""
    return {
        **identity_document(order.plan.recipe),
        "origin": order.plan.origin.document(),
        "not_prepared": order.missing and order.missing.what,
        "script": script,
    }


def submit_document(origin: Origin, jobs: Sequence[Job]) -> dict[str, Any]:
    """The JSON of ``llmb submit``; its keys are a contract."""
    return {"origin": origin.document(), **queued_document(jobs)}


def queued_document(jobs: Sequence[Job]) -> dict[str, Any]:
    """Jobs that were queued, of any kind."""
    return {
        "jobs": [
            {
                "job_id": job.job_id,
                "cluster": job.cluster,
                "run_dir": job.run_dir,
                "script": str(RunFolder(Path(job.run_dir)).batch_script),
                "submitted_at": datetime.fromtimestamp(job.submitted_s, UTC).isoformat(timespec="seconds"),
            }
            for job in jobs
        ],
    }


def submit_text(jobs: Sequence[Job]) -> str:
    return "".join(f"{job.job_id}  {job.run_dir}\n" for job in jobs)


def flags_text(flags: Mapping[str, str | None]) -> str:
    """The resources of a job on one line, before it is queued."""
    shown = ("nodes", "gpus-per-node", "gres", "time", "account", "partition", "qos", "reservation")
    return ", ".join(f"{name} {flags[name]}" for name in shown if flags.get(name))


_SHOWN = (
    *(f"request.{name}" for name in ("workload", "size", "dtype", "gpu_type", "scale", "proxy")),
    "choices.profiling",
    "options.flags.time",
)
"""Settings that are shown in other columns."""
_PlacedJob = tuple[int, tuple[PlannedJob, str]]
"""Its place, and the settings that distinguish it."""


def campaign_table(jobs: Sequence[PlannedJob]) -> Table:
    """One row per job, in the order of submission, and the total."""
    # Settings that all jobs have in common need no column.
    rows = [*enumerate(zip(jobs, different_settings(jobs), strict=True), start=1)]
    asked_by = [_of_job("asked by", lambda item: item.job.where)] if len({item.job.where for item in jobs}) > 1 else []
    columns: list[Column[_PlacedJob]] = [
        number_column("", lambda row: row[0], str),
        _of_job("workload", lambda item: item.recipe.workload),
        _of_job("size", lambda item: f"{item.recipe.size} {item.recipe.proxy_text}".strip()),
        _of_job("dtype", lambda item: item.recipe.dtype),
        _of_job("data", lambda item: item.order.plan.origin.data.short, drop=1),
        _of_job("GPUs", lambda item: item.recipe.scale, right=True),
        _of_job("type", lambda item: item.recipe.gpu_type, drop=3),
        _of_job("nodes", lambda item: item.spec.placement.nodes, right=True, drop=2),
        _of_job("limit", _limit, right=True, wrap=False),
        _of_job("GPU-hours", lambda item: number(item.gpu_hours), right=True),
        _of_job("expected", lambda item: number(item.expected_gpu_hours), right=True),
        _of_job("run", lambda item: f"{item.job.repeat}, profiled" if item.job.profiled else item.job.repeat),
        Column("with", lambda row: row[1][1], optional=True),
        *asked_by,
    ]
    table = table_of("Campaign", rows, columns)
    expected = total(item.expected_gpu_hours for item in jobs)
    table.add_row("", total_text(jobs), *[""] * 7, number(total_gpu_hours(jobs)), number(expected))
    return table


def _of_job(
    header: str, value: Callable[[PlannedJob], Any], *, right: bool = False, wrap: bool = True, drop: int = 0
) -> Column[_PlacedJob]:
    return Column(header, lambda row: value(row[1][0]), right=right, wrap=wrap, drop=drop)


def different_settings(jobs: Sequence[PlannedJob]) -> list[str]:
    """For each job the settings without a column of their own that differ between jobs, such as ``seed=2``."""
    found = [dict(_settings(item.job.wanted.model_dump(mode="json"))) for item in jobs]
    names = [name for name in dict.fromkeys(name for own in found for name in own) if not name.startswith(_SHOWN)]
    kept = [name for name in names if len({str(own.get(name)) for own in found}) > 1]
    return [
        ", ".join(f"{name.rpartition('.')[2]}={own[name]}" for name in kept if own.get(name) is not None)
        for own in found
    ]


def _settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _limit(item: PlannedJob) -> str:
    minutes = item.spec.time_limit_min
    return "none" if minutes is None else f"{minutes:g} min"


def total_text(jobs: Sequence[PlannedJob]) -> str:
    return f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}"


def campaign_document(campaign: Campaign, jobs: Sequence[PlannedJob]) -> dict[str, Any]:
    """The JSON of a campaign; its keys are a contract."""
    by_key = {job.key: job for job in campaign.jobs}
    return {
        "campaign": campaign.campaign,
        "source": campaign.source,
        "gpu_hours": total_gpu_hours(jobs),
        "expected_gpu_hours": total(item.expected_gpu_hours for item in jobs),
        "jobs": [_job_document(item, by_key[item.job.key]) for item in jobs],
    }


def _job_document(item: PlannedJob, job: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "key": job.key,
        "workload": item.recipe.workload,
        "size": item.recipe.size,
        "dtype": item.recipe.dtype,
        "origin": item.order.plan.origin.document(),
        "gpu_type": item.recipe.gpu_type,
        "scale": item.recipe.scale,
        "proxy": bool(item.recipe.proxy_text),
        "repeat": job.repeat,
        "profiled": job.profiled,
        "nodes": item.spec.placement.nodes,
        "time_limit_min": item.spec.time_limit_min,
        "gpu_hours": item.gpu_hours,
        "expected_gpu_hours": item.expected_gpu_hours,
        "asked_by": job.where,
        "state": job.state,
        "job_id": job.job_id,
        "run_dir": job.folder,
        "reason": job.reason,
    }

# SPDX-License-Identifier: Apache-2.0
"""A campaign, before and after it is queued, as a table and a JSON document."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmb.campaigns.campaign import Campaign
from llmb.campaigns.plan import PlannedJob, total_gpu_hours
from llmb.report.numbers import number
from llmb.report.recipe_report import origin_document
from llmb.report.table import Column, Table, number_column, table_of

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
        _of_job("workload", lambda item: item.workload),
        _of_job("size", lambda item: f"{item.size} {item.proxy}" if item.proxy else item.size),
        _of_job("dtype", lambda item: item.dtype),
        _of_job("data", lambda item: item.origin.data.short),
        _of_job("GPUs", lambda item: item.gpus, right=True),
        _of_job("type", lambda item: item.gpu_type),
        _of_job("nodes", lambda item: item.nodes, right=True),
        _of_job("time limit", lambda item: limit_text(item.time_limit_min), right=True),
        _of_job("GPU-hours", lambda item: hours_text(item.gpu_hours), right=True),
        _of_job("run", lambda item: f"{item.job.repeat}, profiled" if item.job.profiled else item.job.repeat),
        Column("with", lambda row: row[1][1], optional=True),
        *asked_by,
    ]
    table = table_of("Campaign", rows, columns)
    table.add_row("", total_text(jobs), *[""] * 7, hours_text(total_gpu_hours(jobs)))
    return table


def _of_job(header: str, value: Callable[[PlannedJob], Any], *, right: bool = False) -> Column[_PlacedJob]:
    return Column(header, lambda row: value(row[1][0]), right=right)


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


def total_text(jobs: Sequence[PlannedJob]) -> str:
    return f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}"


def hours_text(hours: float | None) -> str:
    """An upper bound: jobs may end before their time limit."""
    return number(hours)


def limit_text(minutes: float | None) -> str:
    return "none" if minutes is None else f"{minutes:g} min"


def campaign_document(campaign: Campaign, jobs: Sequence[PlannedJob]) -> dict[str, Any]:
    """The JSON of a campaign; its keys are a contract."""
    by_key = {job.key: job for job in campaign.jobs}
    return {
        "campaign": campaign.campaign,
        "source": campaign.source,
        "gpu_hours": total_gpu_hours(jobs),
        "jobs": [_job_document(item, by_key[item.job.key]) for item in jobs],
    }


def _job_document(item: PlannedJob, job: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "key": job.key,
        "workload": item.workload,
        "size": item.size,
        "dtype": item.dtype,
        "origin": origin_document(item.origin),
        "gpu_type": item.gpu_type,
        "scale": item.gpus,
        "proxy": bool(item.proxy),
        "repeat": job.repeat,
        "profiled": job.profiled,
        "nodes": item.nodes,
        "time_limit_min": item.time_limit_min,
        "gpu_hours": item.gpu_hours,
        "asked_by": job.where,
        "state": job.state,
        "job_id": job.job_id,
        "run_dir": job.folder,
        "reason": job.reason,
    }

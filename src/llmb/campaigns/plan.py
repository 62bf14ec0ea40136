# SPDX-License-Identifier: Apache-2.0
"""What a campaign will ask the cluster for. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmb.campaigns.campaign import CampaignJob
from llmb.launch.slurm.submission import Order

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, and what it asks for; null where it has no time limit."""

    job: CampaignJob
    workload: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    proxy: bool
    nodes: int
    time_limit_min: float | None

    @property
    def gpu_hours(self) -> float | None:
        """At most: most jobs end before their time limit."""
        return None if self.time_limit_min is None else self.gpus * self.time_limit_min / 60


def planned(job: CampaignJob, order: Order) -> PlannedJob:
    recipe, flags = order.plan.recipe, order.sample().flags
    return PlannedJob(
        job=job,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        gpus=recipe.scale,
        proxy=recipe.proxy,
        nodes=int(flags["nodes"] or 1),
        time_limit_min=minutes(flags.get("time") or ""),
    )


def minutes(text: str) -> float | None:
    """Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    match = _TIME.fullmatch(text)
    if not match:
        return None
    days, first, second, third = (int(part) if part else None for part in match.groups())
    head = first or 0
    if days is not None:
        return (days * 24 + head) * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return head * 60 + (second or 0) + third / 60
    return head + (second or 0) / 60


def total_gpu_hours(jobs: Iterable[PlannedJob]) -> float | None:
    """Null where a job has no time limit."""
    hours = [job.gpu_hours for job in jobs]
    return None if None in hours else sum(hour for hour in hours if hour is not None)

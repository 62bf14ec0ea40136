# SPDX-License-Identifier: Apache-2.0
"""The resources that a campaign requests. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from llmb.campaigns.campaign import CampaignJob
from llmb.catalogue.unspecified import Unspecified
from llmb.checkpoints.origin import Origin
from llmb.jobs.order import Order


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with its resources; None if it has no time limit."""

    job: CampaignJob
    workload: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    proxy: str
    """Which proxy it is, in words; empty for the model itself."""
    nodes: int
    time_limit_min: float | None
    origin: Origin
    warning: str | None = None
    """Why a dry run's job cannot be queued yet."""
    unspecified: tuple[Unspecified, ...] = ()

    @property
    def gpu_hours(self) -> float | None:
        """An upper bound: most jobs end before their time limit."""
        return None if self.time_limit_min is None else self.gpus * self.time_limit_min / 60


def planned(job: CampaignJob, order: Order) -> PlannedJob:
    recipe, spec = order.plan.recipe, order.sample()
    return PlannedJob(
        job=job,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        gpus=recipe.scale,
        proxy=recipe.proxy_text,
        nodes=spec.placement.nodes,
        time_limit_min=spec.time_limit_min,
        origin=order.plan.origin,
        warning=order.missing.warning if order.missing else None,
        unspecified=recipe.unspecified,
    )


def total_gpu_hours(jobs: Iterable[PlannedJob]) -> float | None:
    """None if a job has no time limit."""
    hours = [job.gpu_hours for job in jobs]
    return None if None in hours else sum(hour for hour in hours if hour is not None)

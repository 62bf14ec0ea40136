# SPDX-License-Identifier: Apache-2.0
"""Statistics of nodes over the jobs of the history."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from llmb.jobs.job import Job
from llmb.schedulers.lookup import find_scheduler

Recipe = tuple[str, str]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Statistics of one node."""

    node: str
    runs: int
    """Jobs that ran on it, among others."""
    failures: int
    """How many of them failed."""
    blamed: int
    """Jobs in which it was the node at fault."""
    slowdown: float | None
    """Median, over the recipes it ran, of its median step time divided by that of the same recipe elsewhere; 1 is as
    fast. None if no recipe ran both with and without it."""


def node_records(jobs: Iterable[Job]) -> list[NodeRecord]:
    """Every node that a run was on, the slowest first."""
    ran: dict[str, list[Job]] = defaultdict(list)
    times: dict[Recipe, list[tuple[frozenset[str], float]]] = defaultdict(list)
    for job in jobs:
        if job.kind != "run":
            continue
        nodes = frozenset(find_scheduler(job.scheduler).host_names(job.nodes))
        for node in nodes:
            ran[node].append(job)
        if job.step_time_s is not None:
            times[_recipe(job)].append((nodes, job.step_time_s))
    records = [_record(node, own, times) for node, own in ran.items()]
    return sorted(records, key=lambda record: (-(record.slowdown or 0), -record.blamed, record.node))


def _recipe(job: Job) -> Recipe:
    """Key of runs with comparable step times."""
    return job.identity or job.experiment, job.gpu_type


def _record(node: str, jobs: Sequence[Job], times: dict[Recipe, list[tuple[frozenset[str], float]]]) -> NodeRecord:
    ratios = []
    for recipe in {_recipe(job) for job in jobs}:
        here = [time for nodes, time in times[recipe] if node in nodes]
        elsewhere = [time for nodes, time in times[recipe] if node not in nodes]
        if here and elsewhere:
            ratios.append(median(here) / median(elsewhere))
    return NodeRecord(
        node=node,
        runs=len(jobs),
        failures=sum(job.status == "failed" for job in jobs),
        blamed=sum(node in (job.bad_nodes or "").split(",") for job in jobs),
        slowdown=median(ratios) if ratios else None,
    )

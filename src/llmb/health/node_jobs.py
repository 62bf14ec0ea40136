# SPDX-License-Identifier: Apache-2.0
"""A check of several nodes: a job for each of them, so that none waits for another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llmb.catalogue.resolve import CPU
from llmb.errors import UsageError
from llmb.health.kept_checks import CheckFolder
from llmb.jobs.job import Job
from llmb.jobs.store import Store
from llmb.jobs.submit import submit_task
from llmb.jobs.task import TaskOrder, TaskRecord
from llmb.jobspec.options import JobOptions
from llmb.jobspec.spec import PYTHON, Placement
from llmb.schedulers.port import NodeState
from llmb.site.site import Site

OF_RUNS = frozenset(["nodelist", "exclude", "array", "dependency", "segment", "signal", "begin", "requeue"])
"""Flags that a shell may have set for training jobs, and that a check decides itself or has no use for."""
MOST_REJECTED = 3
"""Nodes in a row, from the first on, after which a rejection is taken for one of all jobs."""


@dataclass(frozen=True, slots=True)
class CheckTerms:
    """How nodes are asked for."""

    site: Site
    options: JobOptions
    time_limit_min: int


def check_order(terms: CheckTerms, folder: CheckFolder, node: str, state: NodeState) -> TaskOrder:
    """The job of ``node``, in a partition that has it. Raises UsageError if the job is not possible."""
    flags = {name: value for name, value in terms.options.flags.items() if name not in OF_RUNS}
    base = folder.job(node)
    order = TaskOrder(
        task=TaskRecord(
            kind="check",
            subject=node,
            gpus=bool(state.gpus),
            gpu_type=None if state.gpus else CPU,
            scale=state.gpus or 1,
        ),
        name=base.name,
        parent=base.path.parent,
        title=f"check of {node} by llmb doctor",
        placement=Placement(1, state.gpus or 1, whole_nodes=True),
        time_limit_min=terms.time_limit_min,
        work=(PYTHON, "-P", "-m", "llmb.health.node_task", str(folder.path), node),
        node=node,
        in_container=False,
        options=replace(terms.options, flags=flags),
        site=terms.site,
    )
    if "partition" in flags or not state.partitions or order.spec(base).flags.get("partition") in state.partitions:
        return order
    return replace(order, options=replace(terms.options, flags={**flags, "partition": state.partitions[0]}))


def submit_checks(
    store: Store,
    terms: CheckTerms,
    folder: CheckFolder,
    states: Mapping[str, NodeState],
    environ: Mapping[str, str],
    jobs: dict[str, Job],
    on_node: Callable[[int], None],
) -> dict[str, str]:
    """Adds the job of each node to ``jobs``, which is complete whatever ends this; returns why others were rejected.

    Raises UsageError if none is accepted, and InfrastructureError.
    """
    rejected: dict[str, str] = {}
    for number, (node, state) in enumerate(states.items()):
        on_node(number)
        try:
            jobs[node] = submit_task(store, check_order(terms, folder, node, state), environ, folder.job(node))
        except UsageError as error:
            rejected[node] = error.what
            if not jobs and len(rejected) == min(MOST_REJECTED, len(states)):
                raise
    return rejected

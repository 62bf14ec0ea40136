# SPDX-License-Identifier: Apache-2.0
"""A check of several nodes: a job for each of them, so that none waits for another."""

from dataclasses import dataclass, replace

from llmb.catalogue.resolve import CPU
from llmb.health.kept_checks import CheckFolder
from llmb.jobs.task import TaskOrder, TaskRecord
from llmb.jobspec.options import JobOptions
from llmb.jobspec.spec import PYTHON, Placement
from llmb.schedulers.port import NodeState
from llmb.site.site import Site

OF_RUNS = frozenset(["nodelist", "exclude", "array", "dependency", "segment", "signal", "begin", "requeue"])
"""Flags that a shell may have set for training jobs, and that a check decides itself or has no use for."""


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

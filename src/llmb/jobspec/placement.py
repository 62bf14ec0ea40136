# SPDX-License-Identifier: Apache-2.0
"""How a run's processes are placed on nodes. Pure."""

from dataclasses import dataclass

from llmb.errors import UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """Equal nodes, with a process per GPU (or as many on a CPU)."""

    nodes: int
    processes_per_node: int
    whole_nodes: bool
    """Every GPU of the nodes is used."""

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def place(scale: int, gpus_per_node: int | None) -> Placement:
    """Nodes for ``scale`` processes; None means one node. Raises UsageError if they do not fill nodes evenly."""
    per_node = gpus_per_node or scale
    if scale < per_node:
        return Placement(1, scale, whole_nodes=False)
    nodes, rest = divmod(scale, per_node)
    if rest:
        fitting = [size for size in range(per_node, 0, -1) if scale % size == 0]
        raise UsageError(
            f"a scale of {scale} is not divisible by {per_node} GPUs per node",
            choices=(f"--gpus-per-node {size}" for size in fitting),
            do="give another --scale, or take fewer GPUs of each node",
        )
    return Placement(nodes, per_node, whole_nodes=True)

# SPDX-License-Identifier: Apache-2.0
"""Gloo with one thread per process group, registered with torch as a backend of its own.

``ProcessGroupGloo`` runs two threads per group, which race: each assigns the name of the collective that it has
completed to one string of the group, without a lock (torch 2.11 and 2.13). Names beyond 15 characters live on the heap,
so that all-gather and reduce-scatter in turn on one group, as tensor parallelism with sequence parallelism does them,
write into freed memory and abort the process now and then. A group's collectives come one after the other in any
case, so that one thread costs nothing that a step would show.

The groups of a process also share one device per network interface, where torch makes a device for each group: a device
has a thread of its own that wakes up 100 times a second, and a process can have some ten groups.

torch passes no options to its own ``gloo``; a registered backend is built by our function wherever torch makes a group:
the world, meshes and what is flattened out of them, FSDP.
"""

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GLOO = "gloo_one_thread"
THREADS = 1


def gloo_backend() -> str:
    """The backend of processes that talk through their hosts, ready to be used. The record of a run holds the name."""
    # As torch's own: a process that is bound to a GPU asks each of its groups for the backend of that device.
    dist.Backend.register_backend(GLOO, _one_thread, extended_api=True, devices=["cpu", "cuda"])
    return GLOO


class Hosts:
    """What gathers a few values of all ranks between their hosts: within each node, between the first ranks of nodes,
    and back.

    One group of all ranks would connect each with every other one, and pass the values on as often as there are ranks.
    """

    def __init__(self, rank: int, world_size: int, per_node: int) -> None:
        self.world_size = world_size
        self.first = rank - rank % per_node
        self.node = _group(range(self.first, self.first + per_node), "hosts of a node")
        firsts = range(0, world_size, per_node)
        self.nodes = _group(firsts, "hosts of nodes") if rank == self.first and len(firsts) > 1 else None

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, [ranks, values]."""
        of_node = all_gather(values, self.node)
        if len(of_node) == self.world_size:
            return of_node
        gathered = values.new_empty(self.world_size, len(values))
        if self.nodes:
            gathered = all_gather(of_node, self.nodes).flatten(0, 1)
        dist.broadcast(gathered, self.first, group=self.node)
        return gathered


def all_gather(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks of a group, by default of all ranks, in a new first dimension."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, values, group=group)
    return torch.stack(gathered)


def _group(ranks: range, description: str) -> dist.ProcessGroup:
    """Made by its own ranks alone."""
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), backend=gloo_backend(), use_local_synchronization=True, group_desc=description
    )
    return made


def _one_thread(group: Any, _options: object) -> dist.ProcessGroupGloo:  # noqa: ANN401 (torch does not export its type)
    """What torch itself does for ``gloo``, but for the number of threads."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads = THREADS
    options._timeout = group.timeout
    options.global_ranks_in_group = group.global_ranks_in_group
    options.group_name = group.group_id
    made: dist.ProcessGroupGloo = gloo(group.store, group.group_rank, group.group_size, options)
    return made


@cache
def _devices(interfaces: str) -> list[Any]:
    """Devices of the interfaces named, with commas between them; torch's choice where none is."""
    gloo: Any = dist.ProcessGroupGloo
    named = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [gloo.create_default_device()]

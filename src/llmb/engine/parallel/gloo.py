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

import torch.distributed as dist

GLOO = "gloo_one_thread"
THREADS = 1


def gloo_backend() -> str:
    """The backend of processes that talk through their hosts, ready to be used. The record of a run holds the name."""
    # As torch's own: a process that is bound to a GPU asks each of its groups for the backend of that device.
    dist.Backend.register_backend(GLOO, _one_thread, extended_api=True, devices=["cpu", "cuda"])
    return GLOO


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

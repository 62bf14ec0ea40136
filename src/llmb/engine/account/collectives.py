# SPDX-License-Identifier: Apache-2.0
"""The collectives among a rank's operators: their kind, group and bytes."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from llmb.engine.parallel.mesh import Ranks

NAMESPACES = ("c10d", "_c10d_functional")
RESULT = "result"
KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "allreduce_": ("all_reduce", "tensors"),
        "all_reduce": ("all_reduce", "input"),
        "all_reduce_": ("all_reduce", "input"),
        "allgather_": ("all_gather", "output_tensors"),
        "_allgather_base_": ("all_gather", "output_tensor"),
        "all_gather_into_tensor": ("all_gather", RESULT),
        "all_gather_into_tensor_out": ("all_gather", RESULT),
        "reduce_scatter_": ("reduce_scatter", "input_tensors"),
        "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
        "reduce_scatter_tensor": ("reduce_scatter", "input"),
        "alltoall_base_": ("all_to_all", "input"),
        "all_to_all_single": ("all_to_all", "input"),
        "broadcast_": ("broadcast", "tensors"),
        "broadcast": ("broadcast", "input"),
        "send": ("send", "tensors"),
        "recv_": ("recv", "tensors"),
        "barrier": ("barrier", "tensor"),
    }
)
"""By operator: the kind, and the argument with the whole message: what a rank gathers, sends, or reduces."""


class Message(NamedTuple):
    """group: torch's name of it. peer: the other rank of a send or a receive, within the group."""

    kind: str
    group: str
    bytes: int
    peer: int | None = None


def is_collective(operator: Any) -> bool:  # noqa: ANN401 (an operator)
    return operator.namespace in NAMESPACES and name_of(operator) in KINDS


def name_of(operator: Any) -> str:  # noqa: ANN401 (an operator)
    return str(operator).split(".")[1]


def collective_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Message:  # noqa: ANN401 (whatever an operator takes and returns)
    named = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
    named |= kwargs
    kind, message = KINDS[name_of(operator)]
    whole = result if message == RESULT else named.get(message)
    size = sum(part.numel() * part.itemsize for part in tree_leaves(whole) if isinstance(part, Tensor))
    group = named.get("group_name") or dist.ProcessGroup.unbox(named["process_group"]).group_name
    peer = named.get("dst") if kind == "send" else named.get("src") if kind == "recv" else None
    return Message(kind, str(group), size if kind != "barrier" else 0, peer)


def group_names(ranks: Ranks) -> dict[str, str]:
    """The dimensions of the layout by torch's names of their groups; of several with one group the first."""
    world = dist.distributed_c10d._get_default_group()
    found = {str(world.group_name): "world"} if ranks.world_size > 1 else {}
    for mesh in (ranks.mesh, ranks.fsdp, ranks.expert_mesh, ranks.expert_fsdp):
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            found.setdefault(str(mesh.get_group(dim).group_name), name)
    return found


def shown_group(name: str, known: Mapping[str, str]) -> str:
    """A group as the layout calls it, else as it was described when it was made."""
    return known.get(name) or str(group_of(name).group_desc)


def members(name: str) -> list[int]:
    return list(dist.get_process_group_ranks(group_of(name)))


def group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def collectives_in(node: torch.fx.Node) -> Iterator[Message]:
    """The collective of a node of a graph, if it is one."""
    if isinstance(node.target, torch._ops.OpOverload) and is_collective(node.target):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        yield collective_of(node.target, args, kwargs, node.meta["val"])

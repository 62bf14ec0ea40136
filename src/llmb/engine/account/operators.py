# SPDX-License-Identifier: Apache-2.0
"""The operators of a rank that are counted: products and attention in FLOPs, collectives in bytes, with their group.

torch counts its own products (``flop_registry``); it does not know the engine's, nor that a mask is causal: of causal
attention the half is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from llmb.engine.kernels import span_attention
from llmb.engine.model.linear import add_product
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.experts import expert_products, expert_weight_gradients

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
"""The kind of each operator, and its argument with the whole message that a rank gathers, sends, or reduces."""
aten = torch.ops.aten
FORWARD, BACKWARD = 2, 5
"""Products of attention; the backward pass computes the scores again (Dao et al., 2022, appendix B)."""
PRECISIONS = MappingProxyType({1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"})
"""Names of precisions by the bytes of an element."""
ATTENTION = frozenset(each._opoverload._overloadpacket for each in (span_attention.forward, span_attention.backward))


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
    names = {str(world.group_name): "world"} if ranks.world_size > 1 else {}
    for mesh in (ranks.mesh, ranks.fsdp, ranks.expert_mesh, ranks.expert_fsdp):
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            names.setdefault(str(mesh.get_group(dim).group_name), name)
    return names


def shown_group(name: str, names: Mapping[str, str]) -> str:
    """A group as the layout calls it, else as it was described when it was made."""
    return names.get(name) or str(group_of(name).group_desc)


def group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def collectives_in(node: torch.fx.Node) -> Iterator[Message]:
    """The collective of a node of a graph, if it is one."""
    if isinstance(node.target, torch._ops.OpOverload) and is_collective(node.target):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        yield collective_of(node.target, args, kwargs, node.meta["val"])


def kind_of(operator: Any, args: Sequence[Any]) -> str:  # noqa: ANN401 (whatever an operator takes)
    """``attention``, or the precision of the matrices that a product reads: the lowest."""
    packet = operator._overloadpacket
    if "attention" in str(packet) or packet in ATTENTION:
        return "attention"
    matrices = [
        each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 1
    ]
    return PRECISIONS[min(each.itemsize for each in matrices)]


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:  # noqa: ANN401 (whatever an operator takes and returns)
    """0 for operators that multiply no matrices. Those of the engine have to be known."""
    packet = operator._overloadpacket
    if own := OWN.get(packet):
        return own(*args, **kwargs)
    if operator.namespace == "llmb":
        raise NotImplementedError(f"the FLOPs of {operator} are not counted")
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))


def _grouped(rows: Tensor, matrices: Tensor, *_: object, **__: object) -> int:
    """Groups are parts of the rows, or of the dimension that is summed over."""
    return 2 * rows.numel() * matrices.shape[-1]


def _spans(products: int, query: Tensor, numbers: Sequence[int]) -> int:
    """query: [batch, queries, heads, head_dim]; numbers: see ``TokenSpan``."""
    batch, _, heads, head_dim = query.shape
    pairs = 0
    for start in range(0, len(numbers), 4):
        _, length, key, own_key = numbers[start : start + 4]
        pairs += length * (own_key - key) + length * (length + 1) // 2
    return 2 * products * batch * heads * head_dim * pairs


def _attention(products: int, query: Tensor, key: Tensor, *, causal: bool) -> int:
    """query: [batch, heads, queries, head_dim]."""
    queries, keys = query.shape[2], key.shape[2]
    pairs = queries * (queries + 1) // 2 if causal and queries == keys else queries * keys
    return 2 * products * query.shape[0] * query.shape[1] * query.shape[3] * pairs


OWN: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        aten._grouped_mm: _grouped,
        aten.addmm_: lambda _total, left, right, **_: 2 * left.numel() * right.shape[-1],
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, _value, _dropout=0.0, causal=False, **_: _attention(FORWARD, query, key, causal=causal)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda _gradient, query, key, _value, _seen, _lse, _dropout=0.0, causal=False, **_: _attention(
                BACKWARD, query, key, causal=causal
            )
        ),
        **{
            operator._opoverload._overloadpacket: count
            for operator, count in (
                (add_product, lambda _total, _is_empty, gradient, rows: 2 * gradient.numel() * rows.shape[-1]),
                (expert_products, lambda rows, _inverse, matrices, *_: 2 * rows.numel() * matrices.shape[1]),
                (expert_weight_gradients, lambda rows, _inverse, others, *_: 2 * rows.numel() * len(others)),
                (span_attention.forward, lambda query, _key, _value, *rest: _spans(FORWARD, query, rest[0])),
                (span_attention.backward, lambda _gradient, query, *rest: _spans(BACKWARD, query, rest[4])),
            )
        },
    }
)
"""FLOPs of each operator, from its arguments."""

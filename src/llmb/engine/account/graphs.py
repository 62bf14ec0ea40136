# SPDX-License-Identifier: Apache-2.0
"""Counts FLOPs, messages and memory of compiled blocks and single operators, without running them."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from llmb.engine.kernels import span_attention
from llmb.engine.model.linear import add_product, add_shard_product, shard_gradients
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.experts import expert_products, expert_weight_gradients
from llmb.engine.precision.fp8_layers import cast_product
from llmb.engine.precision.fp8_layers import shard_gradients as fp8_shard_gradients
from llmb.engine.transformations import CompilerBackend

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
"""The kind of each collective operator, and the argument (or ``RESULT``) that holds the whole message of a rank."""
aten = torch.ops.aten
FORWARD, BACKWARD = 2, 5
"""Numbers of matrix products in attention; the backward pass recomputes the scores (Dao et al., 2022, appendix B)."""
PRECISIONS = MappingProxyType({1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"})
"""Names of precisions by the size of an element in bytes."""
ATTENTION = frozenset(each._opoverload._overloadpacket for each in (span_attention.forward, span_attention.backward))


class Message(NamedTuple):
    """A call of a collective. ``group`` is torch's name; ``peer`` is the other rank of a send or receive."""

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
    """Map torch's group names to ``world`` or a mesh dimension, the first if several share a group."""
    world = dist.distributed_c10d._get_default_group()
    names = {str(world.group_name): "world"} if ranks.world_size > 1 else {}
    for mesh in (ranks.mesh, ranks.fsdp, ranks.expert_mesh, ranks.expert_fsdp):
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            names.setdefault(str(mesh.get_group(dim).group_name), name)
    return names


def shown_group(name: str, names: Mapping[str, str]) -> str:
    """Return a group's name in ``names``, see ``group_names``, or the group's description if it has no such name."""
    return names.get(name) or str(group_of(name).group_desc)


def group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def collectives_in(node: torch.fx.Node) -> Iterator[Message]:
    """Yield the collective that a node of a graph calls, if any."""
    if isinstance(node.target, torch._ops.OpOverload) and is_collective(node.target):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        yield collective_of(node.target, args, kwargs, node.meta["val"])


def kind_of(operator: Any, args: Sequence[Any]) -> str:  # noqa: ANN401 (whatever an operator takes)
    """Return ``attention`` for an operator of attention, else the lowest precision of the matrices that it reads."""
    packet = operator._overloadpacket
    if "attention" in str(packet) or packet in ATTENTION:
        return "attention"
    matrices = [
        each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 1
    ]
    return PRECISIONS[min(each.itemsize for each in matrices)]


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:  # noqa: ANN401 (whatever an operator takes and returns)
    """Return an operator's FLOPs, 0 if torch counts none; raise NotImplementedError for llmb's if not in ``OWN``."""
    packet = operator._overloadpacket
    if own := OWN.get(packet):
        return own(*args, **kwargs)
    if operator.namespace == "llmb":
        raise NotImplementedError(f"the FLOPs of {operator} are not counted")
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))


def _grouped(rows: Tensor, matrices: Tensor, *_: object, **__: object) -> int:
    return 2 * rows.numel() * matrices.shape[-1]


def _spans(products: int, query: Tensor, numbers: Sequence[int]) -> int:
    """Return the FLOPs of ``products`` matrix products in span attention. numbers: 4 fields per ``TokenSpan``."""
    batch, _, heads, head_dim = query.shape
    pairs = 0
    for start in range(0, len(numbers), 4):
        _, length, key, own_key = numbers[start : start + 4]
        pairs += length * (own_key - key) + length * (length + 1) // 2
    return 2 * products * batch * heads * head_dim * pairs


def _attention(products: int, query: Tensor, key: Tensor, *, causal: bool) -> int:
    """Return the FLOPs of ``products`` matrix products in attention. query: [batch, heads, queries, head_dim]."""
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
"""Functions that return an operator's FLOPs from its arguments, for operators that ``flop_registry`` lacks."""

CHANGES = torch.ops.higher_order.auto_functionalized_v2
"""Calls another operator, which changes its arguments; returns this operator's results and the changed arguments."""
VIEW = torch.ops.aten._unsafe_view.default
"""A view of a tensor with no other user, which is therefore not declared as a view."""
KERNELS = "llmb/engine/kernels/"
FUSED = "llmb_fused"
"""Key of a node's ``meta``; the value is True for intermediate values of a kernel."""
LONG_LIVED = ("primals", "tangents", "arg")
"""Name prefixes of arguments that the caller keeps while the graph runs; other arguments are freed after use."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled forward or backward pass. added_bytes: the largest growth of memory in use while it runs."""

    backward: bool
    module: fx.GraphModule
    added_bytes: int
    flops: Counter[str]
    collectives: tuple[Message, ...]


class Inner(NamedTuple):
    """The counts of an operator that consists of several steps. bytes: its peak memory, including results."""

    bytes: int
    flops: Counter[str]
    collectives: tuple[Message, ...]


Run = Callable[[Callable[..., Any], Sequence[Any]], Inner]
"""Runs the code of an operator with its arguments, and returns its counts."""
PARTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        each._opoverload: each._init_fn
        for each in (shard_gradients, fp8_shard_gradients, add_shard_product, cast_product)
    }
)
"""The code of operators that consist of several steps, by operator."""
Called = Callable[[Graph, Callable[[], tuple[Any, ...]]], tuple[Any, ...]]
"""A function that counts a call of the graph, then calls its second argument and returns the results."""


def counting_backend(called: Called, run: Run, *, fuses: bool) -> CompilerBackend:
    """Return a backend for ``torch.compile`` that reports each call of a graph to ``called``. fuses: see ``Ledger``."""

    def compiled(module: fx.GraphModule, _inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        graph = counted(module, run, backward=backward)
        call: Callable[..., Any] = make_boxed_func(
            lambda *arguments: called(graph, partial(results_of, module, arguments))
        )
        return call

    def partitioned(joint: fx.GraphModule, inputs: Any, **named: Any) -> tuple[fx.GraphModule, fx.GraphModule]:  # noqa: ANN401 (torch's interface)
        for node in joint.graph.nodes if fuses else ():
            if is_in_kernel(node):
                is_result = not all(map(is_in_kernel, node.users))
                node.meta.update(
                    {FUSED: not is_result} | ({"recompute": CheckpointPolicy.MUST_SAVE} if is_result else {})
                )
        graphs: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", **named
        )
        return graphs

    backend: CompilerBackend = aot_autograd(
        fw_compiler=partial(compiled, backward=False),
        bw_compiler=partial(compiled, backward=True),
        partition_fn=partitioned,
        keep_inference_input_mutations=True,
        decompositions=select_decomp_table,
    )
    return backend


def is_in_kernel(node: fx.Node) -> bool:
    """Return True if the innermost function that called the operator is in ``engine.kernels``."""
    *_, innermost = [line for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line] or [""]
    return KERNELS in innermost


def counted(module: fx.GraphModule, run: Run, *, backward: bool) -> Graph:
    nodes = list(module.graph.nodes)
    calls = {node: call_of(node) for node in nodes if is_call(node)}
    inner = {node: run(PARTS[call.operator], call.args) for node, call in calls.items() if call.operator in PARTS}
    flops, collectives = Counter[str](), list[Message]()
    for node, call in calls.items():
        if node in inner:
            flops += inner[node].flops
            collectives.extend(inner[node].collectives)
        else:
            collectives.extend(collectives_in(node))
            if found := flops_of(*call, node.meta["val"]):
                flops[kind_of(call.operator, call.args)] += found
    added = most_added(nodes, {node: found.bytes for node, found in inner.items()})
    return Graph(backward, module, added, flops, tuple(collectives))


class OperatorCall(NamedTuple):
    operator: Any
    args: Sequence[Any]
    named: Mapping[str, Any]


def is_call(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) or node.target is CHANGES


def call_of(node: fx.Node) -> OperatorCall:
    """Return the operator that a node calls, and its arguments."""
    values: Any = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    args, named = values
    if node.target is not CHANGES:
        return OperatorCall(node.target, args, named)
    (operator,) = args
    names = [argument.name for argument in operator._schema.arguments]
    changed = {name: named["_all_bases"][named[f"_{name}_base_index"]] for name in names if name not in named}
    return OperatorCall(operator, [changed.get(name, named.get(name)) for name in names], {})


def values_read(node: fx.Node, is_stored: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the nodes with stored results that are read to compute ``node`` and all nodes fused into it."""
    seen, new = set[fx.Node](), list(node.all_input_nodes)
    while new:
        each = new.pop()
        if each in seen:
            continue
        seen.add(each)
        if is_stored(each):
            yield each
        else:
            new.extend(each.all_input_nodes)


def results_of(module: fx.GraphModule, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a graph's fake results, which share memory with arguments and each other as real results would."""
    values: dict[fx.Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    (output,) = module.graph.find_nodes(op="output")
    for node in needed_for(output):
        if node in values:
            continue
        target: Any = node.target
        if is_view(node):
            values[node] = target(
                *fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__)
            )
        else:
            values[node] = tree_map(alike, node.meta["val"])
    return tuple(fx.map_arg(output.args[0], values.__getitem__))


def needed_for(output: fx.Node) -> list[fx.Node]:
    """Return the operands of ``output``, and the tensors that they are views of, in the order of the graph."""
    needed, new = set[fx.Node](), list(output.all_input_nodes)
    while new:
        node = new.pop()
        needed.add(node)
        new.extend(node.all_input_nodes if is_view(node) else ())
    return [node for node in output.graph.nodes if node in needed]


def is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return node.target is VIEW or (isinstance(node.target, torch._ops.OpOverload) and makes_view(node.target))


def makes_view(func: Any) -> bool:  # noqa: ANN401 (an operator)
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def alike(value: Any) -> Any:  # noqa: ANN401 (a tensor or a number)
    """Return an empty tensor like a tensor, a number for a symbolic size, or any other value unchanged."""
    if not isinstance(value, Tensor):
        return number_of(value) if isinstance(value, torch.SymInt) else value
    shape, strides = ([number_of(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def number_of(size: Any) -> int:  # noqa: ANN401 (torch.SymInt has no types)
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def most_added(nodes: Sequence[fx.Node], within: Mapping[fx.Node, int]) -> int:
    """Return the largest growth of memory while ``nodes`` run, in bytes. ``within``: peak bytes inside of operators."""
    reads = {node: frozenset(values_read(node, is_stored)) for node in nodes}
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        if is_stored(node):
            last.update(dict.fromkeys(reads[node], index))
    now = most = 0
    for index, node in enumerate(nodes):
        if not is_stored(node):
            continue
        if node.op == "call_function":
            most = max(most, now + within.get(node, 0))
            now += node_bytes(node)
            most = max(most, now)
        for buffer in reads[node]:
            if last[buffer] == index and not (buffer.op == "placeholder" and buffer.name.startswith(LONG_LIVED)):
                now -= node_bytes(buffer)
    return most


def is_stored(node: fx.Node) -> bool:
    """Return True if the node's result is stored in memory, instead of fused into the nodes that read it."""
    if node.op != "call_function":
        return True
    if node.meta.get(FUSED) or is_view(node) or node.target is operator.getitem or not is_call(node):
        return False
    return not is_elementwise(node) or any(map(reads_memory, node.users))


def reads_memory(user: fx.Node) -> bool:
    """Return True if ``user`` reads its operands from memory, because Inductor cannot fuse them into it."""
    if is_view(user):
        return any(map(reads_memory, user.users))
    return not (is_elementwise(user) or getattr(user.target, "_overloadpacket", None) in REDUCTIONS)


def is_elementwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target._overloadpacket in MOVES


aten = torch.ops.aten
MOVES = frozenset(
    {
        aten._to_copy,
        aten.clone,
        aten.cat,
        aten.constant_pad_nd,
        aten.copy_,
        aten.copy,
        aten.expand,
        aten.full,
        aten.full_like,
        aten.zeros,
        aten.arange,
        aten.index,
        aten.embedding,
        aten.gather,
        aten.where,
        aten.empty,
        torch.ops.prims.convert_element_type,
        torch.ops.prims.iota,
    }
)
"""Operators that Inductor fuses although torch does not declare them element-wise."""
REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.var_mean, aten.argmax})


def node_bytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    if node.target is CHANGES:
        value = value[: len(call_of(node).operator._schema.returns)]
    return sum(number_of(part.numel()) * part.itemsize for part in tree_leaves(value) if isinstance(part, Tensor))

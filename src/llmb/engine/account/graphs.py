# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks as graphs that are counted and not run.

torch traces and partitions them as for Inductor, so that the same tensors are kept for the backward pass. A call then
makes the results, and counts what the graph needs beside them: Inductor fuses what it can, so memory is taken by the
results of products, attention, collectives and reductions, by what these read, and by the graph's own results.
Functions of ``engine.kernels``, which are one kernel each on a GPU, are traced as the torch code beside it: with
``fuses``, only their results take memory, and are not recomputed.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from llmb.engine.account.operators import Message, collectives_in, flops_of, kind_of
from llmb.engine.model.linear import add_shard_product
from llmb.engine.model.shards import shard_gradients
from llmb.engine.precision.autograd import cast_product
from llmb.engine.precision.autograd import shard_gradients as fp8_shard_gradients
from llmb.engine.transformations import CompilerBackend

CHANGES = torch.ops.higher_order.auto_functionalized_v2
"""Calls an operator that changes arguments: its results are those of the operator, then what was changed."""
VIEW = torch.ops.aten._unsafe_view.default
"""A view of a tensor that nothing else uses, and therefore not declared as one."""
KERNELS = "llmb/engine/kernels/"
FUSED = "llmb_fused"
"""Mark of a node within a kernel."""
KEPT = ("primals", "tangents", "arg")
"""Arguments that something else holds while the graph runs; others were kept for it alone."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph: a forward or a backward pass. added_bytes: by how much memory in use grows at most while it
    runs."""

    backward: bool
    module: fx.GraphModule
    added_bytes: int
    flops: Counter[str]
    collectives: tuple[Message, ...]


class Inner(NamedTuple):
    """The inside of an operator of the engine: the most bytes that it has at a time, results included."""

    bytes: int
    flops: Counter[str]
    collectives: tuple[Message, ...]


Run = Callable[[Callable[..., Any], Sequence[Any]], Inner]
"""Runs the code of an operator, with its arguments, and counts it."""
PARTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        each._opoverload: each._init_fn
        for each in (shard_gradients, fp8_shard_gradients, add_shard_product, cast_product)
    }
)
"""The code of operators that do several things, by operator."""
Called = Callable[[Graph, Callable[[], tuple[Any, ...]]], tuple[Any, ...]]
"""Gets a graph that is called, and what makes its results."""


def counting_backend(called: Called, run: Run, *, fuses: bool) -> CompilerBackend:
    """A backend for ``torch.compile`` that tells ``called`` of each call of a graph."""

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
    """Return True if the innermost function that called the operator is of ``engine.kernels``."""
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
    """The operator that a node calls, and its arguments."""
    values: Any = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    args, named = values
    if node.target is not CHANGES:
        return OperatorCall(node.target, args, named)
    (operator,) = args
    names = [argument.name for argument in operator._schema.arguments]
    changed = {name: named["_all_bases"][named[f"_{name}_base_index"]] for name in names if name not in named}
    return OperatorCall(operator, [changed.get(name, named.get(name)) for name in names], {})


def values_read(node: fx.Node, is_stored: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the nodes in memory that are read to compute a node, through everything that is fused into it."""
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
    """Fake results, which share memory with arguments and with each other as the real ones would."""
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
    """Its operands and what they are views of, in the order of the graph."""
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
    """Symbols of the compiler mean nothing outside of their graph: the numbers that they stand for."""
    if not isinstance(value, Tensor):
        return number_of(value) if isinstance(value, torch.SymInt) else value
    shape, strides = ([number_of(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def number_of(size: Any) -> int:  # noqa: ANN401 (torch.SymInt has no types)
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def most_added(nodes: Sequence[fx.Node], within: Mapping[fx.Node, int]) -> int:
    """Return by how many bytes memory in use grows at most; results stay, arguments without other references are freed.

    within: the most bytes that an operator has while it runs, where that is more than its results.
    """
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
            if last[buffer] == index and not (buffer.op == "placeholder" and buffer.name.startswith(KEPT)):
                now -= node_bytes(buffer)
    return most


def is_stored(node: fx.Node) -> bool:
    """Return True if its result takes memory, or would as the result of the graph."""
    if node.op != "call_function":
        return True
    if node.meta.get(FUSED) or is_view(node) or node.target is operator.getitem or not is_call(node):
        return False
    return not is_elementwise(node) or any(map(reads_memory, node.users))


def reads_memory(user: fx.Node) -> bool:
    """Return True if Inductor generates no code for it, into which it could fuse the nodes that it reads."""
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
"""Computed where they are read, as what is element-wise by its declaration."""
REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.var_mean, aten.argmax})


def node_bytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    if node.target is CHANGES:
        value = value[: len(call_of(node).operator._schema.returns)]
    return sum(number_of(part.numel()) * part.itemsize for part in tree_leaves(value) if isinstance(part, Tensor))

# SPDX-License-Identifier: Apache-2.0
"""Records what Inductor generates, and computes the shapes of the results instead of running it."""

# mypy: disable-error-code="no-untyped-call"

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import sympy
import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor, fx
from torch._inductor import ir
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_map

from benchmarks.generated_code.accesses import Access, accesses_of, hint
from benchmarks.generated_code.kernels import Kernel, Size, launched
from benchmarks.generated_code.pretend import CPU, GPU, replace
from llmb.engine.account.graphs import is_view, needed_for, number_of, viewed

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "add_product")
ADDING = "add_product"
"""The engine's own product, which adds to its first argument."""
ATTENTION = "attention"
WARPS = 4
"""Of a kernel that does not say how many."""


@dataclass
class Graph:
    """One compiled graph: a forward or a backward pass of a compiled function.

    number: the same for both passes. added_bytes: by how much memory in use grows at most while it runs.
    accumulated_bytes: read and written by products that add to sums of gradients. code: with that of all kernels.
    """

    number: int
    backward: bool
    module: fx.GraphModule
    kernels: list[Kernel] = field(default_factory=list)
    products: int = 0
    attentions: int = 0
    added_bytes: int = 0
    accumulated_bytes: int = 0
    code: str = ""


class Recorder:
    """All graphs that are compiled while it records. ``enter`` and ``leave`` are called around each call of one."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.compiling: list[Graph] = []
        self.enter: Callable[[Graph], None] = lambda _graph: None
        self.leave: Callable[[Graph, Any], None] = lambda _graph, _results: None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Changes Inductor for the whole process."""
        seen, loops = "llmb_seen", "llmb_loops"

        def noting(direction: str, original: Any) -> Any:
            def noted(kernel: TritonKernel, name: str, index: Any, *rest: Any, **named: Any) -> Any:
                kernel.__dict__.setdefault(seen, []).append((direction, name, index, kernel.__dict__.get(loops, 0)))
                return original(kernel, name, index, *rest, **named)

            return noted

        body = TritonKernel.codegen_body

        def ended(kernel: TritonKernel) -> None:
            """A loop over what is reduced, unless all of it is in registers."""
            body(kernel)
            kernel.__dict__[loops] = kernel.__dict__.get(loops, 0) + (not kernel.persistent_reduction)

        replace(TritonKernel, "codegen_body", ended)

        define = TritonScheduling.define_kernel

        def defined(scheduling: Any, source: Any, nodes: Any, kernel: Any) -> str:
            name: str = define(scheduling, source, nodes, kernel)
            found = accesses_of(kernel, getattr(kernel, seen, ()))
            self.compiling[-1].kernels.append(generated(name, found))
            return name

        replace(TritonScheduling, "define_kernel", defined)
        for name, direction in (("load", "load"), ("store", "store"), ("store_reduction", "store")):
            replace(TritonKernel, name, noting(direction, getattr(TritonKernel, name)))
        compile_ = compile_fx._InProcessFxCompile.codegen_and_compile

        def compiled(how: Any, module: fx.GraphModule, inputs: Any, checked: Any, named: Any) -> Any:
            move_to_gpu(module)
            self.compiling.append(Graph(named["graph_id"], bool(named["is_backward"]), copy.deepcopy(module)))
            self.graphs.append(self.compiling[-1])
            try:
                return compile_(how, module, inputs, checked, named)
            finally:
                self.compiling.pop()

        replace(compile_fx._InProcessFxCompile, "codegen_and_compile", compiled)
        replace(GraphLowering, "compile_to_module", self._without_loading())
        yield

    def _without_loading(self) -> Callable[[GraphLowering], Any]:
        """Generates the code, and makes of it a function that computes only shapes."""

        def module_of(lowering: GraphLowering) -> Any:
            graph = self.compiling[-1]
            graph.code = lowering.codegen()[0].value
            add_operators(graph, lowering)
            graph.added_bytes = most_added(lowering)

            def call(arguments: list[Any]) -> tuple[Any, ...]:
                self.enter(graph)
                own = list(arguments)
                arguments.clear()
                results = results_of(graph.module, own)
                del own
                self.leave(graph, results)
                return results

            return SimpleNamespace(call=call, runner=None, __file__="none", key="none")

        return module_of


def results_of(module: fx.GraphModule, arguments: list[Any]) -> tuple[Any, ...]:
    """Fake results, which share memory with arguments and with each other as the real ones would."""
    known: dict[fx.Node, Any] = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    (output,) = module.graph.find_nodes(op="output")
    for node in needed_for(output):
        if node not in known:
            known[node] = viewed(node, known) if is_view(node) else tree_map(alike, node.meta["val"])
    return tuple(fx.map_arg(output.args[0], known.__getitem__))


def alike(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return number_of(value) if isinstance(value, torch.SymInt) else value
    shape, strides = ([number_of(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=GPU)


def move_to_gpu(module: fx.GraphModule) -> None:
    """What C++ asked to be created on the CPU; see ``pretend``."""

    def moved(argument: Any) -> Any:
        return GPU if argument == CPU else argument

    for node in module.graph.nodes:
        if any(isinstance(argument, torch.device) for argument in node.args):
            node.args = tree_map(moved, node.args)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": moved(node.kwargs["device"])}


def add_operators(graph: Graph, lowering: GraphLowering) -> None:
    """Counts what is not generated: products, attention, and kernels that the engine brings along."""
    used: set[str] = set()
    for scheduled in lowering.scheduler.nodes:
        node = scheduled.node
        if not isinstance(node, ir.ExternKernel) or isinstance(node, ir.MultiOutput):
            continue
        name = operator_name(node)
        if name in PRODUCTS:
            graph.products += 1
            graph.accumulated_bytes += 2 * tensor_bytes(node.inputs[0]) if name == ADDING else 0
        elif ATTENTION in name:
            graph.attentions += 1
        elif isinstance(node, ir.UserDefinedTritonKernel):
            graph.kernels.append(launch_of(node, used))
        else:
            graph.kernels.append(Kernel(name, operator_bytes(node), ours=True))
        used.update(each.get_name() for each in tree_leaves_of(node.inputs) if isinstance(each, ir.IRNode))


def most_added(lowering: GraphLowering) -> int:
    """Bytes by which memory in use grows at most: results are kept, arguments that nothing else holds are freed."""
    allocated: dict[str, int] = {}
    kept = frozenset(name for name in lowering.graph_inputs if name.startswith(("primals", "tangents", "arg")))
    now = most = 0
    for node in lowering.scheduler.nodes:
        for buffer in node.get_outputs():
            name = buffer.get_name()
            if name not in lowering.removed_buffers and isinstance(buffer.node.layout, ir.Layout):
                allocated[name] = tensor_bytes(buffer.node) if not buffer.node.get_mutation_names() else 0
                now += allocated[name]
        most = max(most, now)
        for name in node.last_usage:
            if name in lowering.graph_inputs and name not in kept:
                now -= tensor_bytes(lowering.graph_inputs[name])
            now -= allocated.pop(name, 0)
    return most


def generated(name: str, found: Sequence[Access]) -> Kernel:
    return Kernel(
        name,
        sum(each.bytes for each in found),
        uncoalesced=tuple(access for access in found if not access.coalesced),
        repeated=sum(each.repeated for each in found),
        in_flight=sum(each.in_flight for each in found),
    )


def operator_name(node: ir.ExternKernel) -> str:
    overload = getattr(node, "op_overload", None)
    if overload is not None:
        return str(overload).split(".")[1]
    return str(node.python_kernel_name or type(node).__name__).rsplit(".", 1)[-1]


def launch_of(node: ir.UserDefinedTritonKernel, used: Container[str]) -> Kernel:
    """``used``: by operators before."""
    kernel, configs, *_ = node.get_kernel_and_metadata()
    tensors = {name: value for name, value in node.kwargs.items() if isinstance(value, ir.IRNode)}
    sizes = {
        name: Size(tensor_bytes(each), row_bytes(each), is_empty(each) and each.get_name() not in used)
        for name, each in tensors.items()
    }
    given = {name: plain(value) for name, value in node.kwargs.items()}
    programs = prod(plain(each) for each in node.grid[0])
    return launched(kernel, given, sizes, programs, configs[0].num_warps if configs else WARPS)


def plain(value: Any) -> Any:
    """The dtype of a tensor, and the number that a symbol stands for."""
    if isinstance(value, ir.IRNode):
        return value.get_dtype()
    return hint(value) if isinstance(value, sympy.Expr) else value


def is_empty(node: ir.IRNode) -> bool:
    """True for memory that is allocated without values."""
    return isinstance(node, ir.ComputedBuffer) and all(size == 0 for size in node.data.get_size())


def row_bytes(node: Any) -> int:
    *_, columns = [1, *map(hint, node.get_size())]
    return columns * int(node.get_dtype().itemsize)


def operator_bytes(node: ir.ExternKernel) -> int:
    """Every argument once, read or written, and the result."""
    tensors = [each for each in tree_leaves_of(node.inputs) if isinstance(each, ir.IRNode)]
    own = 0 if isinstance(node.layout, ir.NoneLayout | ir.MultiOutputLayout) else tensor_bytes(node)
    return own + sum(map(tensor_bytes, tensors))


def tree_leaves_of(inputs: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(inputs))


def tensor_bytes(node: Any) -> int:
    return hint(node.get_numel()) * int(node.get_dtype().itemsize)

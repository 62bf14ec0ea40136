# SPDX-License-Identifier: Apache-2.0
"""Generates the code of compiled graphs for a GPU that is not there, and computes the shapes of results instead.

``pretended_torch.pretend_gpu`` must have been called.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
from pretended_torch import CPU, GPU, replace
from torch import fx
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.jit import JITFunction

from llmb.engine.account.graphs import number_of, results_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "add_product")


@contextmanager
def generating(note: Callable[[GraphLowering], None] = lambda _lowering: None) -> Iterator[None]:
    """Within, graphs are compiled and not run, kernels are not launched; ``note`` gets each graph with its code.

    Changes Inductor for the whole process.
    """
    compile_ = compile_fx._InProcessFxCompile.codegen_and_compile
    compiling: list[fx.GraphModule] = []

    def compiled(how: Any, module: fx.GraphModule, inputs: Any, checked: Any, named: Any) -> Any:
        move_to_gpu(module)
        compiling.append(copy.deepcopy(module))
        try:
            return compile_(how, module, inputs, checked, named)
        finally:
            compiling.pop()

    def module_of(lowering: GraphLowering) -> Any:
        lowering.codegen()
        note(lowering)
        module = compiling[-1]

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            own = list(arguments)
            arguments.clear()
            return results_of(module, own)

        return SimpleNamespace(call=call, runner=None, __file__="none", key="none")

    replace(compile_fx._InProcessFxCompile, "codegen_and_compile", compiled)
    replace(GraphLowering, "compile_to_module", module_of)
    replace(JITFunction, "run", lambda *_args, **_named: None)
    yield


def move_to_gpu(module: fx.GraphModule) -> None:
    """What C++ asked to be created on the CPU; see ``pretended_torch``."""

    def moved(argument: Any) -> Any:
        return GPU if argument == CPU else argument

    for node in module.graph.nodes:
        if any(isinstance(argument, torch.device) for argument in node.args):
            node.args = tree_map(moved, node.args)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": moved(node.kwargs["device"])}


def moved_bytes(lowering: GraphLowering) -> int:
    """What a graph reads and writes beside products and attention, at best: each tensor of a kernel once."""
    return sum(
        operand_bytes(node.node) if isinstance(node.node, ir.ExternKernel) else node.get_read_write_buffers_sizes()
        for node in lowering.scheduler.nodes
    )


def operand_bytes(node: ir.ExternKernel) -> int:
    """Of an operator that is not generated, such as a kernel of the engine: its arguments, and its result if any."""
    name = str(getattr(node, "op_overload", None) or node.python_kernel_name or "").removeprefix("extern_kernels.")
    if isinstance(node, ir.MultiOutput) or "attention" in name or name.split(".")[-2:][0] in PRODUCTS:
        return 0
    own = () if isinstance(node.layout, ir.NoneLayout | ir.MultiOutputLayout) else (node,)
    tensors = (each for each in (*tree_leaves(node.inputs), *own) if isinstance(each, ir.IRNode))
    return sum(number_of(each.get_numel()) * each.get_dtype().itemsize for each in tensors)

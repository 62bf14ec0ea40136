# SPDX-License-Identifier: Apache-2.0
"""Bytes that operators read and write: one at a time, or fused into kernels as a compiler does.

The rule for compiled graphs: what Inductor generates between two operators that it does not generate (products,
attention, collectives, kernels of the engine) is one kernel, which reads each value once and writes what is stored. So
a result that is only read in the same stretch is never read from memory. Real code has more kernels where reductions
end rows, and reads some values of the same stretch again.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

WITHOUT_TRAFFIC = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense",
                   "record_stream", "set_", "resize_")  # fmt: skip
ONLY_WRITTEN = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_")
"""Operators that do not read what they change in place."""


def traffic(func: Any, name: str, args: Any, kwargs: Any, results: Any) -> int:  # noqa: ANN401 (whatever an operator takes and returns)
    """Bytes of every argument that is read, of every argument that is written, and of new results."""
    read, written, seen = 0, 0, set[int]()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = sum(tensor_bytes(each) for each in tree_leaves(value) if isinstance(each, Tensor))
        changes = argument.alias_info is not None and argument.alias_info.is_write
        written += size if changes else 0
        read += size if not (changes and (name in ONLY_WRITTEN or argument.is_out)) else 0
        seen.update(id(each) for each in tree_leaves(value))
    new = [each for each in tree_leaves(results) if isinstance(each, Tensor) and id(each) not in seen]
    return read + written + sum(map(tensor_bytes, new))


def tensor_bytes(tensor: Tensor) -> int:
    """Without the elements that a view repeats."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.itemsize


class GraphNodes(NamedTuple):
    """What is known of the nodes of a graph, by node. Code is generated for those in none.

    sizes: bytes of results. stored: which are in memory. opaque: operators that no code is generated for. in_kernel:
    those of kernels of the engine. apart: opaque ones that are not counted: products, attention, messages.
    """

    sizes: Mapping[fx.Node, int]
    stored: frozenset[fx.Node]
    opaque: frozenset[fx.Node]
    in_kernel: frozenset[fx.Node]
    apart: frozenset[fx.Node]

    def is_generated(self, node: fx.Node) -> bool:
        return not (node in self.opaque or node in self.apart)

    def is_stored(self, node: fx.Node) -> bool:
        """Also a part of a result."""
        return node in self.stored or (node.target is operator.getitem and node.all_input_nodes[0] in self.stored)


def graph_traffic(nodes: Sequence[fx.Node], known: GraphNodes) -> int:
    """Bytes that one run of a graph reads and writes outside of products, attention and messages."""
    written = 0
    stretch: dict[fx.Node, int] = {}
    reads = set[tuple[fx.Node, int]]()
    for node in nodes:
        before = (stretch[each] + _divides(each, node, known) for each in node.all_input_nodes)
        stretch[node] = at = max(before, default=0)
        if node.op != "call_function" or node not in known.stored or node in known.apart:
            continue
        written += known.sizes[node]
        values = values_read(node, known.is_stored)
        reads.update((each, at) for each in values if stretch[each] < at or each.op == "placeholder")
    return written + sum(known.sizes[node] for node, _ in reads)


def _divides(before: fx.Node, node: fx.Node, known: GraphNodes) -> bool:
    """Whether what ``before`` computes goes through memory on its way to ``node``."""
    if before.op == "placeholder" or before.target is operator.getitem:
        return False
    opaque = not known.is_generated(before) or not known.is_generated(node)
    return opaque or (before in known.in_kernel) != (node in known.in_kernel)


def values_read(node: fx.Node, is_stored: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """What is in memory and read to compute a node, through everything that is fused into it."""
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

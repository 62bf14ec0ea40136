# SPDX-License-Identifier: Apache-2.0
"""What a generated kernel reads and writes: bytes, and whether the threads of a warp share sectors of memory.

Inductor's own estimate counts a slice of a larger buffer once for each expression that addresses it; here elements that
several expressions touch count once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import sympy
from torch._inductor.codegen.simd import IterationRanges
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from benchmarks.generated_code.pretend import resident

SECTOR_BYTES = 32
"""What a GPU reads from memory at least. Neighbors this far apart share nothing."""

REDUCING_WARPS = 16
"""Of a program that reduces in a loop."""
BESIDE = 64
"""How many values it has beside each other at a time if its tiles are long in that dimension; else one."""

Direction = Literal["load", "store"]


@dataclass(frozen=True, slots=True)
class Access:
    """One expression that addresses a buffer. bytes: of the elements that it touches. See ``Kernel`` for the others."""

    direction: Direction
    buffer: str
    bytes: int
    coalesced: bool
    repeated: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """A variable of an index. fast: consecutive threads have consecutive values."""

    length: int
    fast: bool


Place = tuple[Direction, str, sympy.Expr]
Seen = Mapping[Place, Sequence[int]]
"""What a kernel addresses, with the loops that do, in order."""


def accesses_of(kernel: TritonKernel, noted: Iterable[tuple[Direction, str, sympy.Expr, int]]) -> list[Access]:
    """``noted``: what the kernel addressed, also buffers that were removed afterwards, with the number of its loop."""
    gone = {*kernel.removed_buffers, *V.graph.removed_buffers}
    seen: dict[Place, list[int]] = {}
    for direction, name, index, loop in noted:
        if name not in gone:
            seen.setdefault((direction, name, index.expand(identity=True)), []).append(loop)
    # Without a hint, tiles that are long in either kind of dimension are tried on the GPU, and the fastest is taken.
    candidates = [accesses_along(seen, kernel, reduced=reduced) for reduced in long_dimensions(kernel)]
    return min(candidates, key=lambda each: sum(access.bytes for access in each if not access.coalesced))


def accesses_along(seen: Seen, kernel: TritonKernel, *, reduced: bool) -> list[Access]:
    """Of tiles that are long in the dimensions that the kernel reduces, or in the others."""
    axes = axes_of(kernel, reduced=reduced)
    running = share_running(kernel, reduced=reduced)
    grouped: dict[tuple[Direction, str], list[sympy.Expr]] = defaultdict(list)
    for direction, name, index in seen:
        grouped[direction, name].append(index)
    found = []
    for (direction, name), indices in grouped.items():
        itemsize = V.graph.get_dtype(name).itemsize
        counts = touched(indices, axes)
        scale = min(1.0, hint(V.graph.get_numel(name)) / max(1, sum(counts)))
        for index, count in zip(indices, counts, strict=True):
            size = int(count * scale) * itemsize
            stored = seen.get(("store", name, index), ()) if direction == "load" else ()
            new, again = repeats(seen[direction, name, index], stored) if direction == "load" else (True, 0)
            found.append(
                Access(
                    direction,
                    name,
                    size if new else 0,
                    coalesced(index, axes, itemsize),
                    repeated=again * size,
                    in_flight=int(size * running) if again else 0,
                )
            )
    return found


def repeats(loads: Sequence[int], stores: Sequence[int]) -> tuple[bool, int]:
    """Whether what several loops of a program load comes from memory, and how often it is loaded again.

    It does not if a loop before stored it. Within a loop, it is loaded once.
    """
    new = not stores or min(loads) <= min(stores)
    return new, len(set(loads)) - new


def share_running(kernel: TritonKernel, *, reduced: bool) -> float:
    """How much of all that it reads a kernel's programs have at a time, which together run through all of it."""
    rows = prod([hint(tree.numel) for tree in kernel.range_trees if not reduces(tree)])
    return min(1.0, resident(REDUCING_WARPS) * (1 if reduced else BESIDE) / rows)


def axes_of(kernel: TritonKernel, *, reduced: bool) -> dict[sympy.Symbol, Axis]:
    """Of all variables of a kernel whose threads run along dimensions that it reduces, or along the others."""
    return {
        symbol: Axis(hint(entry.length), hint(entry.divisor) == 1 and reduces(entry.root) == reduced)
        for symbol, entry in kernel.range_tree_nodes.items()
    }


def reduces(tree: IterationRanges) -> bool:
    """Whether a kernel reduces a range; by its name, as torch's own property has a type that mypy cannot take."""
    return tree.prefix.startswith("r")


def long_dimensions(kernel: TritonKernel) -> tuple[bool, ...]:
    """Whether tiles are long in dimensions that the kernel reduces; both if that is chosen later."""
    if not kernel.inside_reduction:
        return (False,)
    hint = kernel.features.get_reduction_hint()
    if hint is ReductionHint.DEFAULT:
        return (False, True)
    return (hint is ReductionHint.INNER,)


def touched(indices: Sequence[sympy.Expr], axes: Mapping[sympy.Symbol, Axis]) -> list[int]:
    """How many elements each index adds to those before it.

    Two that differ by less than the run of memory that they cover touch the same elements, as in the two halves that
    rotary embeddings exchange.
    """
    counts, shifts = [], defaultdict[sympy.Expr, list[int]](list)
    for index in indices:
        constant, moving = index.as_coeff_Add()
        count = prod(axes[symbol].length for symbol in index.free_symbols if symbol in axes)
        extent = run_length(moving, axes)
        overlaps = any(abs(int(constant) - shift) < extent for shift in shifts[moving])
        shifts[moving].append(int(constant))
        counts.append(0 if overlaps else count)
    return counts


def run_length(index: sympy.Expr, axes: Mapping[sympy.Symbol, Axis]) -> int:
    """Length of the contiguous run of memory that an index covers, in elements."""
    steps = sorted((abs(step(index, symbol)), axes[symbol].length) for symbol in index.free_symbols if symbol in axes)
    extent = 1
    for stride, length in steps:
        if stride == extent:
            extent *= length
    return extent


def coalesced(index: sympy.Expr, axes: Mapping[sympy.Symbol, Axis], itemsize: int) -> bool:
    """True if neighbors along one of the fast variables are in the same sector, or if none of them moves it."""
    fast = [step(index, symbol) for symbol in index.free_symbols if symbol in axes and axes[symbol].fast]
    return not fast or min(map(abs, fast)) * itemsize < SECTOR_BYTES


def step(index: sympy.Expr, symbol: sympy.Symbol) -> int:
    """By how much the index grows with the variable, from 0 to 1."""
    others = {other: 0 for other in index.free_symbols if other != symbol}
    along = index.subs(others)
    return int(along.subs({symbol: 1}) - along.subs({symbol: 0}))


def hint(expression: Any) -> int:
    """The number that a size of the compiler stands for in this step."""
    sizes: Any = V.graph.sizevars
    known = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(known(expression))

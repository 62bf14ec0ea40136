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
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

SECTOR_BYTES = 32
"""What a GPU reads from memory at least. Neighbors this far apart share nothing."""

Direction = Literal["load", "store"]


@dataclass(frozen=True, slots=True)
class Access:
    """One expression that addresses a buffer. bytes: of the elements that it touches."""

    direction: Direction
    buffer: str
    bytes: int
    coalesced: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """A variable of an index. fast: consecutive threads have consecutive values."""

    length: int
    fast: bool


def accesses_of(kernel: TritonKernel, seen: Iterable[tuple[Direction, str, sympy.Expr]]) -> list[Access]:
    """``seen``: what the kernel addressed, also buffers that were removed afterwards."""
    gone = {*kernel.removed_buffers, *V.graph.removed_buffers}
    grouped: dict[tuple[Direction, str], list[sympy.Expr]] = defaultdict(list)
    for direction, name, index in seen:
        plain = index.expand(identity=True)
        if name not in gone and plain not in grouped[direction, name]:
            grouped[direction, name].append(plain)
    # Without a hint, tiles that are long in either kind of dimension are tried on the GPU, and the fastest is taken.
    candidates = [accesses_along(grouped, axes_of(kernel, reduced=reduced)) for reduced in long_dimensions(kernel)]
    return min(candidates, key=lambda each: sum(access.bytes for access in each if not access.coalesced))


def accesses_along(
    grouped: Mapping[tuple[Direction, str], Sequence[sympy.Expr]], axes: Mapping[sympy.Symbol, Axis]
) -> list[Access]:
    found = []
    for (direction, name), indices in grouped.items():
        itemsize = V.graph.get_dtype(name).itemsize
        numel = _number(V.graph.get_numel(name))
        counts = touched(indices, axes)
        scale = min(1.0, numel / max(1, sum(counts)))
        for index, count in zip(indices, counts, strict=True):
            found.append(Access(direction, name, int(count * scale) * itemsize, coalesced(index, axes, itemsize)))
    return found


def axes_of(kernel: TritonKernel, *, reduced: bool) -> dict[sympy.Symbol, Axis]:
    """Of all variables of a kernel whose threads run along dimensions that it reduces, or along the others."""
    return {
        symbol: Axis(
            _number(entry.length), _number(entry.divisor) == 1 and entry.root.prefix.startswith("r") == reduced
        )
        for symbol, entry in kernel.range_tree_nodes.items()
    }


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


def _number(expression: Any) -> int:
    sizes: Any = V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
    return int(hint(expression))

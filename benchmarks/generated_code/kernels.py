# SPDX-License-Identifier: Apache-2.0
"""What one launch of a kernel reads and writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.generated_code.accesses import Access
from benchmarks.generated_code.pretend import resident
from benchmarks.generated_code.ttir import Use, uses_of

Values = Mapping[str, Any]
PARTS: Mapping[str, Mapping[str, Callable[[Values], int]]] = MappingProxyType(
    {"rotate_kernel": {"product": lambda given: 2 * given["rows"] * given["heads"] * 2 * given["PAIRS"]}}
)
"""Bytes of those tensors of which a kernel of the engine uses only a part, by its arguments."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. bytes: read and written, each element that a program uses several times once.

    repeated: bytes that programs read again in a later loop. in_flight: of those rows, in all programs that run at a
    time; as many have to be in the cache. ours: a kernel of the engine itself, or an operator without code here.
    """

    name: str
    bytes: int
    ours: bool = False
    uncoalesced: tuple[Access, ...] = ()
    repeated: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """Of a tensor. empty: whatever a kernel reads of it, it has written itself."""

    bytes: int
    row_bytes: int
    empty: bool = False


def launched(kernel: Any, given: Values, sizes: Mapping[str, Size], programs: int, warps: int) -> Kernel:
    """Of a Triton kernel. ``given``: a dtype for each tensor, and the values of all other arguments."""
    name: str = kernel.fn.__name__
    parts = PARTS.get(name, {})
    used = [
        (own_use(use) if size.empty else use, size, parts[each](given) if each in parts else size.bytes)
        for each, use in uses_of(kernel, given).items()
        if (size := sizes.get(each))
    ]
    running = min(programs, resident(warps))
    return Kernel(
        name,
        sum(part * (use.reads + use.writes) for use, _, part in used),
        ours=True,
        repeated=sum(part * use.repeats for use, _, part in used),
        in_flight=sum(min(part, running * use.rows * size.row_bytes) for use, size, part in used if use.repeats),
    )


def own_use(use: Use) -> Use:
    """Of a tensor that had no values before."""
    return replace(use, reads=False, repeats=use.repeats + use.reads)

# SPDX-License-Identifier: Apache-2.0
"""What a Triton kernel does with the memory that its parameters point to, from Triton's own intermediate code."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch._higher_order_ops import triton_kernel_wrap as wrap
from triton._C.libtriton import ir, passes

LOADS = ("tt.load", "tt.descriptor_load")
STORES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store")
LOOPS = ("scf.for", "scf.while")
FUNCTION = "tt.func"
TILE = re.compile(r"tensor<((?:\d+x)+)")
LINE = re.compile(r'"[^"]+":\d+:\d+')
"""A place in a file. What else a location has, names of variables, may differ between copies of one line."""
ITERATION = 3
"""Operands of a loop before the values that it carries: its first and last number, and the step."""


@dataclass(frozen=True, slots=True)
class Use:
    """Of the memory of one parameter.

    reads, writes: whether it is read before it is written, and whether it is written. repeats: how often it is read
    again by another loop of the same program, also after that program wrote it. rows: of a tile.
    """

    reads: bool
    writes: bool
    repeats: int
    rows: int


@dataclass(frozen=True, slots=True)
class Operation:
    """region: that it is in; own: those that it has. line: of the kernel, and of its callers. Values are numbers."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    region: int
    own: tuple[int, ...]
    tile: tuple[int, ...]
    line: tuple[str, ...]


@dataclass
class Code:
    """Of a kernel without calls. Inner operations come before those that they are in. arguments: of a region."""

    operations: list[Operation] = field(default_factory=list)
    arguments: dict[int, tuple[int, ...]] = field(default_factory=dict)


def uses_of(kernel: Any, given: Mapping[str, Any]) -> Mapping[str, Use]:
    """By parameter. ``given``: a dtype for each tensor, and the values of all others."""
    return _uses_of(kernel, tuple(given.items()))


@cache
def _uses_of(kernel: Any, key: tuple[tuple[str, Any], ...]) -> Mapping[str, Use]:
    given = {name: torch.empty(2, dtype=value, device="meta") if isinstance(value, torch.dtype) else value
             for name, value in key}  # fmt: skip
    module, names = wrap.generate_ttir(kernel, given, {})
    code = code_of(inlined(module))
    origins, owners = origins_of(code), {region: each for each in code.operations for region in each.own}
    accesses: dict[int, list[tuple[Operation, int]]] = defaultdict(list)
    for operation in code.operations:
        if operation.name in (*LOADS, *STORES):
            for place in origins.get(operation.operands[0], ()):
                accesses[place].append((operation, loop_of(operation, owners)))
    # The origins of a pointer are also the numbers in its offsets.
    return {names[place]: use_of(found) for place, found in accesses.items()}


def inlined(module: Any) -> Any:
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "inlined")
    return module


def code_of(module: Any) -> Code:
    code = Code()

    def note(operation: Any) -> None:
        block = operation.get_block()
        region = block.get_parent().id() if block is not None else 0
        if block is not None and region not in code.arguments:
            code.arguments[region] = tuple(block.get_argument(each).id() for each in range(block.get_num_arguments()))
        operands = [operation.get_operand(each) for each in range(operation.get_num_operands())]
        shape = TILE.search(str(operands[0].get_type())) if operands else None
        code.operations.append(
            Operation(
                operation.get_name(),
                tuple(each.id() for each in operands),
                tuple(operation.get_result(each).id() for each in range(operation.get_num_results())),
                region,
                tuple(operation.get_region(each).id() for each in range(operation.get_num_regions())),
                tuple(int(size) for size in shape[1].split("x") if size) if shape else (),
                tuple(LINE.findall(str(operation.get_result(0).get_loc()))) if operation.get_num_results() else (),
            )
        )

    module.walk(note)
    return code


def origins_of(code: Code) -> Mapping[int, frozenset[int]]:
    """The numbers of the parameters that each value is computed from; what is loaded is from none."""
    sources = sources_of(code)
    (function,) = (each for each in code.operations if each.name == FUNCTION)
    origins = {value: frozenset((place,)) for place, value in enumerate(code.arguments[function.own[0]])}
    # Loops carry values from one round to the next.
    changed = True
    while changed:
        changed = False
        for value, before in sources.items():
            found = frozenset[int]().union(*(origins.get(each, frozenset()) for each in before))
            changed |= origins.get(value, frozenset()) != found
            origins[value] = found
    return origins


def sources_of(code: Code) -> Mapping[int, set[int]]:
    """The values that each value is computed from."""
    sources: dict[int, set[int]] = defaultdict(set)
    yielded = {each.region: each.operands for each in code.operations if each.name == "scf.yield"}
    for each in code.operations:
        if each.name in (*LOADS, FUNCTION):
            continue
        if each.name == "scf.for":
            _, *carried = code.arguments[each.own[0]]
            for place, result in enumerate(each.results):
                before = {each.operands[ITERATION + place], yielded[each.own[0]][place]}
                sources[carried[place]] |= before
                sources[result] |= before
            continue
        before = {*each.operands, *(value for region in each.own for value in yielded.get(region, ()))}
        for value in (*each.results, *(value for region in each.own for value in code.arguments.get(region, ()))):
            sources[value] |= before
    return sources


def loop_of(operation: Operation, owners: Mapping[int, Operation]) -> int:
    """The region of the innermost loop that an operation is in; that of the function if it is in none."""
    region = operation.region
    while owners[region].name not in (*LOOPS, FUNCTION):
        region = owners[region].region
    return region


def use_of(accesses: Sequence[tuple[Operation, int]]) -> Use:
    """``accesses``: with their loops, in the order of the code."""
    loads = [(each, loop) for each, loop in accesses if each.name in LOADS]
    places = dict.fromkeys(loop for _, loop in loads)
    lines = [{each.line for each, loop in loads if loop == place} for place in places]
    # A loop that is written once and unrolled reads other parts in each copy.
    loops = [own for number, own in enumerate(lines) if not any(own & other for other in lines[:number])]
    _, first = accesses[0]
    reads = any(loop == first for _, loop in loads)
    return Use(
        reads=reads,
        writes=any(each.name in STORES for each, _ in accesses),
        repeats=len(loops) - reads,
        rows=max((prod(each.tile[:-1]) for each, _ in loads), default=0),
    )

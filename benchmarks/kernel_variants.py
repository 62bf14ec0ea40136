# SPDX-License-Identifier: Apache-2.0
"""Which sizes of tiles and programs of the engine's kernels are fastest on a GPU? It must have FP8.

Every kernel of benchmarks.fused_kernels is measured with the engine's own sizes
and with others. If others are faster for all models, change the constants of the
kernel's module; tests then check what the kernel needs of registers and memory.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.fused_kernels import (
    Case,
    Seconds,
    cases,
    copies,
    fp8_gpu,
    kernels_of,
    of_model,
    on_gpu,
    read_options,
    show,
    time_of,
)

Sizes = Mapping[str, int]
"""Constants of a kernel's module, by name."""
CASTS = tuple(
    {"ROWS": rows, "COLUMNS": columns, "WARPS": warps}
    for rows, columns, warps in ((128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 128, 8), (128, 128, 16), (128, 32, 8))
)
ROTATIONS = tuple(
    {"ROWS": rows, "HEADS": heads, "WARPS": warps}
    for rows, heads, warps in ((64, 4, 4), (32, 4, 4), (32, 8, 4), (64, 8, 8), (64, 2, 8), (128, 4, 8))
)
VARIANTS: Mapping[str, tuple[Sizes, ...]] = MappingProxyType({"fp8_cast_triton": CASTS, "rotary_triton": ROTATIONS})
CLOSE = 0.02
"""How much the norm of a result may differ: sums of other tiles are rounded otherwise before they are cast."""


@dataclass(frozen=True, slots=True)
class Measured:
    """time_s: None if there is a problem. own: with the sizes of the engine."""

    model: str
    kernel: str
    sizes: Sizes
    own: bool
    time_s: float | None
    problem: str | None


def main() -> None:
    options, device = read_options("kernel_variants", __doc__), fp8_gpu()
    found: list[Measured] = []
    if not options.json:
        show(header(torch.cuda.get_device_name(device)))
    for name in options.models:
        for case in cases(*of_model(name, options.rows), device):
            sys.stderr.write(f"{name}: {case.name}\n")
            variants = list(measure(name, case, kernels_of(case.function), on_gpu))
            if not options.json:
                show("\n".join(lines(variants)))
            found += variants
    if options.json:
        show(json.dumps([asdict(one) for one in found], indent=2))


def measure(model: str, case: Case, module: ModuleType, seconds: Seconds) -> Iterator[Measured]:
    """With the module's own sizes first."""
    kernel: Callable[..., object] = getattr(module, case.function)
    others = VARIANTS[module.__name__.rpartition(".")[2]]
    own = {name: getattr(module, name) for name in others[0]}
    expected, sets = kernel(*case.arguments), copies(case.arguments)
    for sizes in (own, *(each for each in others if each != own)):
        with mock.patch.multiple(module, **sizes):
            time_s, problem = attempt(kernel, sets, expected, seconds)
        yield Measured(model, case.name, sizes, sizes is own, time_s, problem)


def attempt(
    kernel: Callable[..., object], sets: Sequence[tuple[Any, ...]], expected: object, seconds: Seconds
) -> tuple[float | None, str | None]:
    """The time of a call, or why it has none."""
    from triton.errors import TritonError  # a machine without a GPU has no Triton

    try:
        if not close(kernel(*sets[0]), expected):
            return None, "another result"
        return time_of(kernel, sets, seconds), None
    except (TritonError, RuntimeError) as error:  # the latter from launches and allocations
        return None, type(error).__name__


def close(found: Any, expected: Any) -> bool:  # noqa: ANN401 (what kernels return)
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(apart(one, other) <= CLOSE for one, other in pairs if isinstance(one, Tensor))


def apart(found: Tensor, expected: Tensor) -> float:
    size = float(expected.float().norm())
    return float((found.float() - expected.float()).norm()) / (size or 1)


def header(device: str) -> str:
    """80 columns, as all lines."""
    return (
        f"{device}, torch {torch.__version__}; times of kernels with\n"
        "the engine's sizes, and with others: as multiples of its speed"
    )


def lines(variants: Sequence[Measured]) -> Iterator[str]:
    """Of one kernel; the fastest has a star."""
    yield f"{variants[0].model} {variants[0].kernel}"
    for one in variants:
        sizes = " ".join(f"{name} {size}" for name, size in one.sizes.items())
        yield f"  {sizes:<44}{figures(one, variants)}"


def figures(one: Measured, alike: Sequence[Measured]) -> str:
    if one.time_s is None:
        return f"  {one.problem}"
    times = [each.time_s for each in alike if each.time_s is not None]
    beside = "".join(f"{each.time_s / one.time_s:>7.2f}" for each in alike if each.own and each.time_s is not None)
    return f"{1e6 * one.time_s:>10.1f} us{beside}{' *' if one.time_s == min(times) else ''}"


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How fast are the engine's kernels of casts and rotations on a GPU? It must have FP8.

Each kernel computes what lies between two matrix products of a model's layer.
It is compared, in one run, with a copy that moves as many bytes, and with what
torch.compile makes of the same torch code. Target: faster than that.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.engine.cases import GPU_MODELS
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Model
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.kernels import elementwise
from llmb.engine.kernels.elementwise import CAPABILITY, Activation, Heads
from llmb.engine.model.attention import rotary_tables

SLOWER, MISSING = 1, 3
"""Exit codes."""
MODELS = tuple(GPU_MODELS)
"""Of Maverick, the dense layers."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SETS = 3
"""Of operands."""
Seconds = Callable[[Callable[[], object]], float]
"""Measures one call."""


class Case(NamedTuple):
    """One operation. function: by its name in ``module``."""

    name: str
    module: ModuleType
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """bytes: of all tensors read and written, each once."""

    model: str
    kernel: str
    bytes: int
    kernel_s: float
    copy_s: float
    compiled_s: float

    @property
    def of_copy(self) -> float:
        """The kernel's speed as a multiple of the copy's."""
        return self.copy_s / self.kernel_s

    @property
    def of_compiled(self) -> float:
        return self.compiled_s / self.kernel_s


def main() -> None:
    options, device = read_options("fused_kernels", __doc__), fp8_gpu()
    found, failed = [], False
    if not options.json:
        show(header(torch.cuda.get_device_name(device)))
    for name in options.models:
        for case in cases(*of_model(name, options.rows), device):
            sys.stderr.write(f"{name}: {case.name}\n")
            try:
                found.append(measure(name, case, on_gpu))
            except RuntimeError as error:  # as launches and allocations raise it; the others are still worth measuring
                sys.stderr.write(f"{name}: {case.name} failed: {error}\n")
                failed = True
                continue
            if not options.json:
                show(line(found[-1]))
    if options.json:
        ratios = [{"of_copy": one.of_copy, "of_compiled": one.of_compiled} for one in found]
        documents = [asdict(one) | ratio for one, ratio in zip(found, ratios, strict=True)]
        show(json.dumps(documents, indent=2))
    slower = any(one.of_compiled < 1 for one in found)
    sys.exit(SLOWER if failed or slower else 0)


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_options(name: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8b"], help="(default: 8b)")
    parser.add_argument("--rows", type=positive, help="tokens of a micro-batch (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def fp8_gpu() -> torch.device:
    """Exits if there is none."""
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY):
        sys.stderr.write("nothing measured: torch sees no GPU with FP8 (compute capability 8.9 or higher)\n")
        sys.exit(MISSING)
    return torch.device("cuda", torch.cuda.current_device())


def of_model(name: str, rows: int | None) -> tuple[Model, int]:
    """The model, and the tokens of a micro-batch."""
    workload, size = GPU_MODELS[name]
    recipe = resolve(Catalogue(), Request(workload=workload, size=size, dtype=Dtype.FP8, gpu_type="h200", scale=1))
    return recipe.model, rows or recipe.layout.mbs * recipe.layout.seq_len


def cases(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    yield from cast_cases(model, rows, device)
    yield from rotary_cases(model, rows, device)


def cast_cases(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    activation: Activation = "swiglu" if model.norm == "rmsnorm" else "squared-relu"
    scale = torch.ones((), device=device)
    yield Case("cast", elementwise, "cast_both_ways", (random(rows, model.hidden_size, device), scale, E4M3))
    features = model.ffn_hidden_size
    inputs = random(rows, features * (2 if activation == "swiglu" else 1), device)
    yield Case(f"{activation}, cast", elementwise, "cast_activated", (inputs, scale, activation, E4M3))
    given = inputs, random(rows, features, device), scale, activation, E5M2
    yield Case(f"{activation} backward, cast", elementwise, "cast_activation_gradient", given)


def rotary_cases(model: Model, rows: int, device: torch.device) -> Iterator[Case]:
    tables = rotary_tables(model, torch.arange(rows, device=device))
    of_query, of_value, size = model.attention_heads, model.kv_heads, model.head_dim
    given = (
        random(rows, number * size, device).view(1, rows, number, size) for number in (of_query, of_value, of_value)
    )
    scale = torch.ones((), device=device)
    operands = Heads(*given), tables.rotation, scale, E5M2
    yield Case("rotation backward, cast", elementwise, "cast_rotated_gradient", operands)


def random(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def measure(model: str, case: Case, seconds: Seconds) -> Measured:
    torch.compiler.reset()
    arguments = case.arguments
    kernel = getattr(kernels_of(case.function), case.function)
    first = next(each for each in tree_leaves(arguments) if isinstance(each, Tensor))
    size = moved_bytes(arguments, kernel(*arguments))
    sets = copies(arguments)
    sources = [(first.new_empty(size // 2, dtype=torch.uint8),) for _ in sets]
    plain, own = (compiled(each) for each in (getattr(case.module, case.function), kernel))
    with without_kernels(case.module):
        compiled_s = time_of(plain, sets, seconds)
    return Measured(
        model=model,
        kernel=case.name,
        bytes=size,
        kernel_s=time_of(own, sets, seconds),
        copy_s=time_of(torch.clone, sources, seconds),
        compiled_s=compiled_s,
    )


def copies(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Taken in turn, so that the cache has nothing of a call when it is repeated."""
    return [tree_map_only(Tensor, torch.clone, arguments) for _ in range(SETS)]


def time_of(function: Callable[..., object], sets: Sequence[tuple[Any, ...]], seconds: Seconds) -> float:
    """Of one call."""
    return seconds(lambda: [function(*arguments) for arguments in sets]) / len(sets)


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    found: Callable[..., object] = torch.compile(function, fullgraph=True, dynamic=False)
    return found


def kernels_of(function: str) -> ModuleType:
    """The module with the kernel of a function, which has the same name and arguments."""
    from llmb.engine.kernels import fp8_cast_triton, rotary_triton  # a machine without a GPU has no Triton

    return rotary_triton if "rotated" in function else fp8_cast_triton


def without_kernels(module: ModuleType) -> AbstractContextManager[object]:
    """Within, functions of the module are traced as torch code."""
    return mock.patch.object(module, "has_kernel", lambda _tensor: False)


def moved_bytes(arguments: Iterable[object], results: object) -> int:
    """Of all different tensors."""
    tensors = {each.data_ptr(): each for each in tree_leaves((arguments, results)) if isinstance(each, Tensor)}
    return sum(each.nbytes for each in tensors.values())


def on_gpu(call: Callable[[], object]) -> float:
    """Median of replayed graphs of calls, which the host does not delay."""
    from triton.testing import do_bench_cudagraph

    call()
    return float(do_bench_cudagraph(call, return_mode="median")) / 1000


def header(device: str) -> str:
    """80 columns, as each line."""
    return (
        f"{device}, torch {torch.__version__}; speeds beside a copy of as many bytes,\n"
        "and beside torch.compile's code\n"
        f"{'model':<6}{'kernel':<30}{'MB':>7}{'us':>9}{'GB/s':>7}{'copy':>7}{'compile':>8}"
    )


def line(one: Measured) -> str:
    return (
        f"{one.model:<6}{one.kernel:<30}{one.bytes / 1e6:>7.0f}{1e6 * one.kernel_s:>9.1f}"
        f"{one.bytes / one.kernel_s / 1e9:>7.0f}{one.of_copy:>7.2f}{one.of_compiled:>8.2f}"
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels outside of compiled code: which tensors they read and write. Nothing is launched."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from benchmarks.generated_code.pretend import replace

LOADS = ("tt.load",)
STORES = ("tt.store", "tt.atomic_rmw", "tt.atomic_cas")

Told = Callable[[str, list[Tensor], list[Tensor]], None]
"""Gets a kernel's name, and what it reads and what it writes."""


@contextmanager
def not_launching(tell: Told) -> Iterator[None]:
    """Calls ``tell`` for each launch, instead of it."""
    original = JITFunction.run
    mutation = wrap.triton_kernel_wrapper_mutation
    fake = mutation.python_key_table[FakeTensorMode]

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:  # noqa: ARG001
        given = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: value for name, value in named.items() if name in kernel.arg_names
        }
        tell(kernel.fn.__name__, *used(kernel, given))

    def run_operator(mode: Any, **named: Any) -> Any:
        kernel: Any = wrap.kernel_side_table.get_kernel(named["kernel_idx"])
        given = {**wrap.kernel_side_table.get_constant_args(named["constant_args_idx"]), **named["kwargs"]}
        tell(kernel.fn.__name__, *used(kernel, given))
        return fake(mode, **named)

    replace(JITFunction, "run", run)
    mutation.python_key_table[FakeTensorMode] = run_operator
    try:
        yield
    finally:
        replace(JITFunction, "run", original)
        mutation.python_key_table[FakeTensorMode] = fake


def used(kernel: Any, given: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a kernel loads from, and those that it stores to."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    # Of a scalar only whether it is one matters, and of a tensor its dtype.
    key = tuple((name, value.dtype if name in tensors else value) for name, value in given.items())
    loaded, stored = _parameters(kernel, key)
    # The origins of a pointer are also the numbers in its offsets.
    return [tensors[name] for name in loaded if name in tensors], [tensors[name] for name in stored if name in tensors]


@cache
def _parameters(kernel: Any, key: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = {name: torch.empty(2, dtype=value, device="meta") if isinstance(value, torch.dtype) else value
             for name, value in key}  # fmt: skip
    module, names = wrap.generate_ttir(kernel, given, {})
    functions = wrap.ttir_to_functions(module)
    name = next(iter(functions))
    return tuple(tuple(names[place] for place in sorted(_reached(functions, name, kinds))) for kinds in (LOADS, STORES))  # type: ignore[return-value]


def _reached(functions: Any, name: str, kinds: tuple[str, ...]) -> set[int]:
    """The parameters whose memory operations of these kinds access."""
    body = functions[name]
    found: set[int] = set()
    for operation in (each for several in body.values() for each in several):
        if operation.name in kinds:
            found |= _origins(body, operation.args[0])
        elif operation.name == "tt.call":
            for place in _reached(functions, operation.fn_call_name, kinds):
                found |= _origins(body, operation.args[place])
    return found


def _origins(body: Any, value: Any) -> set[int]:
    """The parameters that a pointer is computed from; what is loaded is not a pointer."""
    if isinstance(value, wrap.Param):
        return {value.idx}
    return {
        place
        for operation in body.get(value, ())
        if operation.name not in LOADS
        for argument in operation.args
        for place in _origins(body, argument)
    }

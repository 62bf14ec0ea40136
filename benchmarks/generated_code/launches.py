# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels outside of compiled code. Nothing is launched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from benchmarks.generated_code.capture import WARPS
from benchmarks.generated_code.kernels import Kernel, Size, launched
from benchmarks.generated_code.pretend import replace
from benchmarks.generated_code.traffic import tensor_bytes

Told = Callable[[Kernel, list[Tensor]], None]
"""Gets a kernel, and the tensors that it was given."""


@contextmanager
def not_launching(tell: Told) -> Iterator[None]:
    """Calls ``tell`` instead of each launch."""
    original = JITFunction.run
    mutation = wrap.triton_kernel_wrapper_mutation
    fake = mutation.python_key_table[FakeTensorMode]

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:  # noqa: ARG001
        given = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: value for name, value in named.items() if name in kernel.arg_names
        }
        told(kernel, given, grid(given) if callable(grid) else grid, named.get("num_warps", WARPS))

    def run_operator(mode: Any, **named: Any) -> Any:
        kernel: Any = wrap.kernel_side_table.get_kernel(named["kernel_idx"])
        given = {**wrap.kernel_side_table.get_constant_args(named["constant_args_idx"]), **named["kwargs"]}
        configs = getattr(kernel, "configs", ())
        warps = configs[0].num_warps if configs else WARPS
        told(kernel.fn if configs else kernel, given, named["grid"][0], warps)
        return fake(mode, **named)

    def told(kernel: Any, given: Mapping[str, Any], grid: Sequence[int], warps: int) -> None:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        plain = {name: value.dtype if name in tensors else value for name, value in given.items()}
        sizes = {name: size_of(tensor) for name, tensor in tensors.items()}
        tell(launched(kernel, plain, sizes, prod(grid), warps), list(tensors.values()))

    replace(JITFunction, "run", run)
    mutation.python_key_table[FakeTensorMode] = run_operator
    try:
        yield
    finally:
        replace(JITFunction, "run", original)
        mutation.python_key_table[FakeTensorMode] = fake


def size_of(tensor: Tensor) -> Size:
    *_, columns = [1, *tensor.shape]
    return Size(tensor_bytes(tensor), columns * tensor.itemsize)

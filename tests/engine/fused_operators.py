# SPDX-License-Identifier: Apache-2.0
"""torch's fused operators on CPUs: its own reference functions, which gather and then multiply, for that device.

FP8 products are torch's too, instead of emulated ones, and what is gathered in FP8 travels as bytes, which gloo sends.
"""

from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from llmb.engine.model import linear
from llmb.engine.precision import apply, fp8_layers
from llmb.runs.attention_choice import Fp8Product

functional = torch.ops._c10d_functional
OPERATORS = (
    *("fused_all_gather_matmul", "fused_all_gather_scaled_matmul"),
    *("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"),
)
calls: list[str] = []
"""The names of the operators that were called, in order."""


def use_fused_operators() -> torch.library.Library:
    """In this process, for as long as the result exists."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in OPERATORS:
        library.impl(name, _counted(name), "CPU")
    for module in (linear, fp8_layers):
        module.fuses = lambda _tensor, group: group.fused
    apply.fp8_product = lambda *_, **__: Fp8Product(dtype="fp8", why="a test")
    symmetric_memory.get_symm_mem_workspace = lambda *_, **__: None
    return library


def _counted(name: str) -> Any:
    reference = getattr(symmetric_memory, f"_{name}_fallback")

    def call(*given: Any, **named: Any) -> Any:
        calls.append(name)
        gather = functional.all_gather_into_tensor
        functional.all_gather_into_tensor = _as_bytes(gather)
        try:
            return reference(*given, **named)
        finally:
            functional.all_gather_into_tensor = gather

    return call


def _as_bytes(gather: Any) -> Any:
    def start(tensor: Tensor, *more: Any) -> Tensor:
        if not tensor.dtype.is_floating_point or tensor.itemsize > 1:
            return gather(tensor, *more)
        return gather(tensor.view(torch.uint8), *more).view(tensor.dtype)

    return start

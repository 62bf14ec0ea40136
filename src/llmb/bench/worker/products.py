# SPDX-License-Identifier: Apache-2.0
"""Matrix products as the engine computes them, on random data."""

import torch
from torch import Tensor

from llmb.bench.jobs import ProductCase, ProductDtype
from llmb.bench.worker.timing import Call
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Scaled, multiply
from llmb.runs.attention import fp8_product

DTYPES: dict[ProductDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def product(case: ProductCase, device: torch.device) -> Call:
    """Operands are random: zeros draw less power and run at higher clocks."""
    if case.dtype == "fp8":
        return _fp8_product(case, device)
    dtype = DTYPES[case.dtype]
    m, k, n = case.m, case.k, case.n
    match case.training_pass:
        case "forward":
            x, w = _random(m, k, dtype, device), _random(n, k, dtype, device)
            return lambda: x @ w.T
        case "input_gradient":
            g, w = _random(m, n, dtype, device), _random(n, k, dtype, device)
            return lambda: g @ w
        case "weight_gradient":
            g, x = _random(m, n, dtype, device), _random(m, k, dtype, device)
            return lambda: g.T @ x


def _fp8_product(case: ProductCase, device: torch.device) -> Call:
    """The engine's own, of matrices that were cast and transposed before. Only the forward pass accumulates fast."""
    m, k, n = case.m, case.k, case.n
    shapes, formats = {
        "forward": (((m, k), (n, k)), (INPUT, WEIGHT)),
        "input_gradient": (((m, n), (k, n)), (GRADIENT, WEIGHT)),
        "weight_gradient": (((n, m), (k, m)), (GRADIENT, INPUT)),
    }[case.training_pass]
    one = torch.ones((), device=device)
    left, right = (
        Scaled(_random(*shape, torch.bfloat16, device).to(FORMATS[which]), one)
        for shape, which in zip(shapes, formats, strict=True)
    )
    dtype = fp8_product("cuda" if device.type == "cuda" else "cpu", emulate=False).dtype
    fast = formats == (INPUT, WEIGHT)
    return lambda: multiply(left, right.mT, fast=fast, product_dtype=dtype)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device)

# SPDX-License-Identifier: Apache-2.0
"""The speed of a device's own kernels: matrix products, attention and memory copies, at given shapes, on random data.

A separate program, ``python -m benchmarks.engine.ceilings REQUEST_FILE RESULT_FILE``, that needs only torch. The
request is {"device", "products": [...], "attention": [...], "copy_bytes"}, with the fields of ``Product`` and
``Attention``; the result has the same entries in the same order, each with ``seconds`` or with a ``reason``.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP = 2
LEAST_REPEATS = 3
MOST_REPEATS = 20
ENOUGH_S = 0.08
"""Repeats of one shape end after this time, except for the minimum number."""
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True)
class Product:
    """A layer's matrix product in one of its three training passes, of [m, k] inputs with [n, k] weights.

    ``forward`` gives [m, n], ``input_gradient`` [m, k] and ``weight_gradient`` [n, k]; each is 2mkn FLOPs.
    """

    m: int
    k: int
    n: int
    dtype: str
    training_pass: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention in bf16 (fp32 on request): forward, and forward with backward."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median of ``repeats``, and their minimum and maximum."""

    seconds: float
    fastest: float
    slowest: float
    repeats: int


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(measure_all(request)))


def measure_all(request: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(request["device"])
    products = [Product(**values) for values in request["products"]]
    attention = [Attention(**values) for values in request["attention"]]
    result: dict[str, Any] = {"environment": environment(device), "products": [], "attention": []}
    copy_bytes = request["copy_bytes"]
    timing = timed(copy(copy_bytes, device), device)
    result["copy"] = {"bytes": copy_bytes, "gb_s": 2 * copy_bytes / timing.seconds / 1e9, **asdict(timing)}
    for product in products:
        flops = 2 * product.m * product.k * product.n
        result["products"].append({**asdict(product), **attempt(partial(multiply, product, device), device, flops)})
    for shape in attention:
        result["attention"].extend(attention_rows(shape, device))
    return result


def environment(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    cudnn = torch.backends.cudnn.version() if on_gpu else None  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "device_memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else None,
        "cpu_threads": torch.get_num_threads(),
    }


def attempt(make: Callable[[], Callable[[], object]], device: torch.device, flops: float) -> dict[str, Any]:
    """One timing as JSON values; a shape that this device does not support has its reason instead."""
    try:
        timing = timed(make(), device)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"seconds": None, "tflops": None, "reason": str(error).strip().split("\n")[0]}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {**asdict(timing), "tflops": flops / timing.seconds / 1e12, "reason": None}


def timed(call: Callable[[], object], device: torch.device) -> Timing:
    for _ in range(WARM_UP):
        call()
    clock = gpu_seconds if device.type == "cuda" else cpu_seconds
    times: list[float] = []
    while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and sum(times) < ENOUGH_S):
        times.append(clock(call))
    return Timing(statistics.median(times), min(times), max(times), len(times))


def gpu_seconds(call: Callable[[], object]) -> float:
    """Timed between two events on the GPU's own clock, which excludes the host's launch time."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copy(size: int, device: torch.device) -> Callable[[], object]:
    """Copies ``size`` bytes within the device's memory: that many are read and written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def multiply(product: Product, device: torch.device) -> Callable[[], object]:
    """Operands are random: zeros draw less power and run at higher clocks. In FP8 they are cast beforehand."""
    left, right = operands(product)
    if product.dtype == "fp8":
        return multiply_fp8(product, left, right, device)
    dtype = torch.float32 if product.dtype == "fp32" else torch.bfloat16
    m, k, n = product.m, product.k, product.n
    if product.training_pass == "forward":
        x, w = random(m, k, dtype, device), random(n, k, dtype, device)
        return lambda: x @ w.T
    if product.training_pass == "input_gradient":
        g, w = random(m, n, dtype, device), random(n, k, dtype, device)
        return lambda: g @ w
    g, x = random(m, n, dtype, device), random(m, k, dtype, device)
    return lambda: g.T @ x


def operands(product: Product) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes a, b of the pass as a x b transposed, which is the only form that FP8 hardware supports."""
    m, k, n = product.m, product.k, product.n
    forms = {
        "forward": ((m, k), (n, k)),
        "input_gradient": ((m, n), (k, n)),
        "weight_gradient": ((n, m), (k, m)),
    }
    return forms[product.training_pass]


def multiply_fp8(
    product: Product, left: tuple[int, int], right: tuple[int, int], device: torch.device
) -> Callable[[], object]:
    """Gradients are e5m2; only the forward pass uses fast, less exact accumulation, as in FP8 recipes."""
    forward = product.training_pass == "forward"
    a = random(*left, torch.bfloat16, device).to(torch.float8_e4m3fn if forward else torch.float8_e5m2)
    b = random(*right, torch.bfloat16, device).to(torch.float8_e4m3fn).T
    one = torch.ones((), device=device)
    fast = forward and device.type == "cuda"
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device)


def attention_rows(shape: Attention, device: torch.device) -> list[dict[str, Any]]:
    """Each backend that a GPU may have; on a CPU torch's choice."""
    square = shape.batch * shape.heads * shape.seq_len**2 * shape.head_dim
    rows = []
    for backend in BACKENDS if device.type == "cuda" else ("default",):
        for backward in (False, True):
            # Two products, of which causal attention needs half; the backward pass has five to the forward's two.
            flops = 2 * square * (3.5 if backward else 1)
            measured = attempt(partial(attend, shape, device, backend, backward=backward), device, flops)
            rows.append({**asdict(shape), "backend": backend, "backward": backward, **measured})
    return rows


def attend(shape: Attention, device: torch.device, backend: str, *, backward: bool) -> Callable[[], object]:
    """SDPA of heads with the memory layout of a projection's output: [batch, seq, heads, head size]."""
    dtype = torch.float32 if shape.dtype == "fp32" else torch.bfloat16

    def heads(count: int) -> Tensor:
        values = torch.randn(shape.batch, shape.seq_len, count, shape.head_dim, dtype=dtype, device=device)
        return values.requires_grad_(backward)

    query, key, value = heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)
    gradient = torch.randn_like(query).transpose(1, 2)
    grouped = shape.heads != shape.kv_heads

    def call() -> None:
        q, k, v = (part.transpose(1, 2) for part in (query, key, value))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if backward:
            torch.autograd.grad(seen, (query, key, value), gradient)

    def with_backend() -> None:
        with sdpa_kernel(BACKENDS[backend]):
            call()

    return call if backend == "default" else with_backend


if __name__ == "__main__":
    main()

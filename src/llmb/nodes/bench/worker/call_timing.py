# SPDX-License-Identifier: Apache-2.0
"""Times calls on a device, among them products: bursts with cold caches, and for seconds in sequence."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from llmb.engine.device import Moment, synchronize
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Scaled, multiply
from llmb.nodes.bench.protocol import CaseList, ProductCase, ProductDtype, Timing
from llmb.runs.attention_choice import fp8_product

DTYPES: dict[ProductDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device)


Call = Callable[[], object]
AT_LEAST_FLUSHED = 2**27
"""Bytes that are written to empty a GPU's cache whose size torch does not tell."""
CHUNK_S = 0.05
"""GPU calls of about this time are timed together, so that the queue never runs empty."""
LAST_PART = 1 / 3
"""Share of the time that something was sustained which counts."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call with its data in place. ``seconds`` times it in another way than between its start and its end."""

    call: Call
    context: AbstractContextManager[object] = field(default_factory=nullcontext)
    backend: str | None = None
    flushes: bool = False
    """Whether a burst finds the GPU's cache emptied, as in training, where other layers come between."""
    seconds: Callable[[], float] | None = None


def timed(prepared: PreparedCall, device: torch.device, job: CaseList, sustained_s: float | None) -> Timing:
    with prepared.context:
        for _ in range(job.warm_ups):
            prepared.call()
        if sustained_s is None:
            times, repeats = burst(prepared, device, job), None
        else:
            times, repeats = last_part(*_sustained(prepared.call, device, sustained_s))
    return Timing(
        seconds=median(times),
        fastest=min(times),
        slowest=max(times),
        repeats=repeats or len(times),
        backend=prepared.backend,
    )


def burst(prepared: PreparedCall, device: torch.device, job: CaseList) -> list[float]:
    """Seconds of each of a few calls."""
    once = prepared.seconds or _timer(prepared, device)
    times: list[float] = []
    while len(times) < job.least_repeats or (len(times) < job.most_repeats and sum(times) < job.enough_s):
        times.append(once())
    return times


def _timer(prepared: PreparedCall, device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return lambda: cpu_seconds(prepared.call)
    flushed = torch.empty(flushed_bytes(device), dtype=torch.uint8, device=device) if prepared.flushes else None

    def seconds() -> float:
        """Between two events on the GPU's own clock. The host queues the call while the GPU still writes."""
        if flushed is not None:
            flushed.zero_()
        first = Moment(device)
        prepared.call()
        last = Moment(device)
        last.wait()
        return last.seconds_since(first)

    return seconds


def flushed_bytes(device: torch.device) -> int:
    """Twice the cache of the GPU."""
    known = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return max(2 * int(known), AT_LEAST_FLUSHED)


def cpu_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _sustained(call: Call, device: torch.device, seconds: float) -> tuple[list[float], int]:
    """Times of all chunks, and how many calls a chunk has, until all chunks have taken ``seconds``."""
    first = Moment(device)
    call()
    last = Moment(device)
    last.wait()
    once = last.seconds_since(first)
    calls = max(1, round(CHUNK_S / once)) if once > 0 else 1
    times: list[float] = []
    waiting = [Moment(device)]
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or not times:
        for _ in range(calls):
            call()
        waiting.append(Moment(device))
        # One chunk is in the queue while the host waits for the one before.
        if len(waiting) > 2:
            waiting[1].wait()
            times.append(waiting[1].seconds_since(waiting[0]))
            del waiting[0]
    synchronize(device)
    return times, calls


def last_part(times: list[float], calls: int) -> tuple[list[float], int]:
    """Seconds of one call in the chunks of the last part, and the number of these calls."""
    whole, passed = sum(times), 0.0
    kept: list[float] = []
    for chunk in reversed(times):
        if kept and passed >= LAST_PART * whole:
            break
        passed += chunk
        kept.append(chunk / calls)
    return kept[::-1], calls * len(kept)


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

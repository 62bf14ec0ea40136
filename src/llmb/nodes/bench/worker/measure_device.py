# SPDX-License-Identifier: Apache-2.0
"""The program that times cases on a device: ``python -m llmb.nodes.bench.worker.measure_device JOB_FILE RESULT_FILE``.

For each case, it allocates the data, times the calls, and frees the memory.
"""

import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
from torch import Tensor

from llmb.base.errors import UsageError
from llmb.engine.attention_backend import BackendTrial, attention_kernel, try_kernel
from llmb.engine.device import Moment, device_name, exact_fp32, synchronize
from llmb.engine.environment import cudnn_version, nccl_version, node_gpus
from llmb.engine.model.attention import attend
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Scaled, multiply
from llmb.nodes.bench.protocol import (
    AttentionCase,
    BenchProgress,
    Case,
    CaseList,
    CopyCase,
    DeviceReport,
    LaunchCase,
    ProductCase,
    ProductDtype,
    Timing,
    Timings,
    TransferCase,
)
from llmb.readers.samples.host import Device, host_name
from llmb.runs.attention_choice import AttentionBackend, Trial, fp8_product, select, try_backends

DTYPES: dict[ProductDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device)


Call = Callable[[], object]
AT_LEAST_FLUSHED = 2**27
"""The minimum number of bytes to write to flush a GPU's cache, whose size torch may not report."""
CHUNK_S = 0.05
"""Calls that take about this number of seconds are timed together, so that the GPU's queue is never empty."""
LAST_PART = 1 / 3
"""Only the end of sustained work is timed: this fraction of its duration."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call with its data allocated; ``seconds``, if set, replaces the timing of ``call`` in a burst."""

    call: Call
    context: AbstractContextManager[object] = field(default_factory=nullcontext)
    backend: str | None = None
    flushes: bool = False
    """True to flush the GPU's cache before each call of a burst, because in training, other layers run in between."""
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
    """Return the seconds of each repetition of a burst."""
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
        """Return the GPU seconds of one call; if it needs a cold cache, queue it while the GPU flushes its cache."""
        if flushed is not None:
            flushed.zero_()
        first = Moment(device)
        prepared.call()
        last = Moment(device)
        last.wait()
        return last.seconds_since(first)

    return seconds


def flushed_bytes(device: torch.device) -> int:
    """Return the number of bytes to write to flush the GPU's cache, at least twice its size."""
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return max(2 * int(size), AT_LEAST_FLUSHED)


def cpu_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _sustained(call: Call, device: torch.device, seconds: float) -> tuple[list[float], int]:
    """Repeat the call for ``seconds``; return the seconds of each chunk but the last, and the calls per chunk."""
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
        # While the host waits for a chunk, the next one is in the queue.
        if len(waiting) > 2:
            waiting[1].wait()
            times.append(waiting[1].seconds_since(waiting[0]))
            del waiting[0]
    synchronize(device)
    return times, calls


def last_part(times: list[float], calls: int) -> tuple[list[float], int]:
    """Return the seconds per call in each chunk of the last part, and the total number of calls in these chunks."""
    whole, passed = sum(times), 0.0
    seconds: list[float] = []
    for chunk in reversed(times):
        if seconds and passed >= LAST_PART * whole:
            break
        passed += chunk
        seconds.append(chunk / calls)
    return seconds[::-1], calls * len(seconds)


def product(case: ProductCase, device: torch.device) -> Call:
    """Return a call of a product; operands are random, because zeros draw less power and permit higher clocks."""
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
    """Return a call of the engine's FP8 product without casts; only ``forward`` uses fast accumulation."""
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


MANY = 500
"""A number of launches that fits into a GPU's queue, so that the host never waits for space in it."""
HEAD_START_CYCLES = 20_000_000
"""The GPU waits for this number of cycles, about 10 ms, so that all launches are queued when the first begins."""


class AttentionChoices:
    """Chooses attention backends as the engine does, but does not check results; tries each shape once."""

    def __init__(self, device: torch.device, job: CaseList) -> None:
        self.device, self.job = device, job
        self.chosen: dict[AttentionCase, Trial] = {}

    def prepare(self, case: AttentionCase) -> PreparedCall:
        """Prepare a case with the best backend; raise RuntimeError if none works, MemoryError if memory runs out."""
        shape = case.model_copy(update={"direction": "both"})
        if shape not in self.chosen:
            self.chosen[shape] = self._try(shape)
        trial = self.chosen[shape]
        call = _call(case, self.device, repeats_heads=trial.repeats_heads, backend=trial.backend)
        context = attention_kernel(trial.backend)
        return PreparedCall(call, context, backend=trial.backend, flushes=True)

    def _try(self, case: AttentionCase) -> Trial:
        def attempt(backend: AttentionBackend, timed: bool) -> list[Trial]:
            measure = partial(self._measure, case, backend, timed)
            return try_kernel(backend, measure, None, grouped=case.heads != case.kv_heads, timed=timed)

        kind: Device = "cuda" if self.device.type == "cuda" else "cpu"
        try:
            report = select(case.backend, try_backends(case.backend, kind, attempt))
        except UsageError as error:
            raise RuntimeError(error.what) from error
        return Trial(backend=report.backend, repeats_heads=report.repeats_heads)

    def _measure(
        self, case: AttentionCase, backend: AttentionBackend, timed: bool, repeats_heads: bool
    ) -> BackendTrial:
        try:
            call = _call(case, self.device, repeats_heads=repeats_heads, backend=backend)
            with attention_kernel(backend):
                call()
                milliseconds = 1e3 * median(burst(PreparedCall(call), self.device, self.job)) if timed else None
                return BackendTrial(milliseconds, None, None)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error


def _call(case: AttentionCase, device: torch.device, *, repeats_heads: bool, backend: AttentionBackend) -> Call:
    """Return a call for the case's direction, to make in the backend's context; ``backward`` lacks the forward pass."""
    # Query, key and value as from the projections, and the gradient of the result: [batch, seq, heads, head_dim].
    *heads, gradient = (
        torch.randn(case.batch, case.seq_len, number, case.head_dim, dtype=DTYPES[case.dtype], device=device)
        for number in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    for part in heads:
        part.requires_grad_()

    def forward() -> Tensor:
        query, key, value = heads
        return attend(query, key, value, repeats_heads=repeats_heads)

    if case.direction == "forward":
        return forward
    if case.direction == "both":
        return lambda: torch.autograd.grad(forward(), heads, gradient)
    with attention_kernel(backend):
        output = forward()
    return lambda: torch.autograd.grad(output, heads, gradient, retain_graph=True)


def launch(case: LaunchCase, device: torch.device) -> PreparedCall:
    value = torch.zeros(1, device=device)
    ways: dict[str, Callable[[Tensor, torch.device], float]] = {
        "host": host_seconds,
        "device": device_seconds,
        "round_trip": round_trip_seconds,
    }
    if case.way == "graph":
        # All launches as one graph. Before capture, the operation must have run once on a non-default stream.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            value.add_(1)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add_many(value)
        seconds = partial(graph_seconds, graph, device)
    else:
        seconds = partial(ways[case.way], value, device)
    return PreparedCall(seconds, seconds=seconds)


def add_many(value: Tensor) -> None:
    for _ in range(MANY):
        value.add_(1)


def host_seconds(value: Tensor, device: torch.device) -> float:
    """Return the host's seconds to launch an operation, which on a CPU includes running it."""
    synchronize(device)
    began = time.perf_counter()
    add_many(value)
    return (time.perf_counter() - began) / MANY


def device_seconds(value: Tensor, device: torch.device) -> float:
    torch.cuda._sleep(HEAD_START_CYCLES)
    first = Moment(device)
    add_many(value)
    return _since(first, device)


def graph_seconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    torch.cuda._sleep(HEAD_START_CYCLES)
    first = Moment(device)
    graph.replay()
    return _since(first, device)


def round_trip_seconds(value: Tensor, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    value.add_(1)
    synchronize(device)
    return time.perf_counter() - began


def _since(first: Moment, device: torch.device) -> float:
    last = Moment(device)
    last.wait()
    return last.seconds_since(first) / MANY


def copy(case: CopyCase, device: torch.device) -> PreparedCall:
    source = torch.randint(0, 255, (case.size_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return PreparedCall(lambda: target.copy_(source), flushes=True)


def transfer(case: TransferCase, device: torch.device) -> PreparedCall:
    """Prepare a transfer; copies of pinned memory are queued like kernels, but other copies block the host."""
    here = torch.full((case.size_bytes,), 1, dtype=torch.uint8, pin_memory=case.pinned)
    there = torch.full((case.size_bytes,), 2, dtype=torch.uint8, device=device)
    source, target = (here, there) if case.direction == "host_to_device" else (there, here)
    return PreparedCall(lambda: target.copy_(source, non_blocking=case.pinned))


Work = ProductCase | AttentionCase | CopyCase | TransferCase | LaunchCase
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 6}
"""Bytes per element; for FP8, an upper bound that includes the bf16 source or, on a CPU, the fp32 copy."""
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(work: Work) -> int:
    """Return the number of bytes of operands and results."""
    if isinstance(work, ProductCase):
        return BYTES[work.dtype] * (work.m * work.k + work.n * work.k + work.m * work.n)
    if isinstance(work, AttentionCase):
        heads = 4 * work.heads + 4 * work.kv_heads
        return BYTES[work.dtype] * work.batch * work.seq_len * work.head_dim * heads
    if isinstance(work, CopyCase):
        return 2 * work.size_bytes
    return work.size_bytes if isinstance(work, TransferCase) else 0


def free_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that the kernel and the container let this process allocate; None if neither reports them."""
    return min(filter(None, (_available(meminfo), _left_in(cgroup))), default=None)


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _left_in(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(1, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else None


GB = 10**9
CPU_MEMORY_ERRORS = ("can't allocate memory", "not enough memory")


def run_job(job: CaseList, say: Callable[[BenchProgress], None], gpu: int = 0) -> Timings:
    """Time all cases in order; the timing of a case that fails contains the reason."""
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    exact_fp32()
    choices = AttentionChoices(device, job)
    timings = []
    for number, case in enumerate(job.cases):
        say(BenchProgress(name=case.name, number=number, total=len(job.cases), seconds=case.sustained_s))
        timings.append(attempt(case, choices, device, job))
    return Timings(device=describe(device), timings=tuple(timings))


def attempt(case: Case, choices: AttentionChoices, device: torch.device, job: CaseList) -> Timing:
    need, free = needed_bytes(case.work), free_bytes()
    if device.type == "cpu" and free is not None and need > free:
        reason = f"it needs {need / GB:.3g} GB, but only {free / GB:.3g} GB of memory are free"
        return Timing(seconds=None, reason=reason, out_of_memory=True)
    try:
        return timed(prepare(case.work, choices, device), device, job, case.sustained_s)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Timing(seconds=None, reason=_first_line(error), out_of_memory=True)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        text = _first_line(error)
        return Timing(seconds=None, reason=text, out_of_memory=any(mark in text for mark in CPU_MEMORY_ERRORS))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepare(work: Work, choices: AttentionChoices, device: torch.device) -> PreparedCall:
    if isinstance(work, ProductCase):
        return PreparedCall(product(work, device), flushes=True)
    if isinstance(work, AttentionCase):
        return choices.prepare(work)
    if isinstance(work, CopyCase):
        return copy(work, device)
    return transfer(work, device) if isinstance(work, TransferCase) else launch(work, device)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def describe(device: torch.device) -> DeviceReport:
    on_gpu = device.type == "cuda"
    return DeviceReport(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        cudnn=cudnn_version() if on_gpu else None,
        cudnn_number=torch.backends.cudnn.version() if on_gpu else None,
        nccl=nccl_version() if on_gpu else None,
        driver=node_gpus(host_name()).driver if on_gpu else None,
        device=device_name(device),
        device_memory_gib=torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else None,
        cpu_threads=torch.get_num_threads(),
        binding=os.environ.get("LLMB_BINDING"),
    )


def say(progress: BenchProgress) -> None:
    sys.stdout.write(progress.model_dump_json() + "\n")
    sys.stdout.flush()


def leave() -> NoReturn:
    """Exit immediately, because torch's threads can abort a completed program while the interpreter shuts down."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    job = CaseList.model_validate_json(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(run_job(job, say).model_dump_json())
    leave()


if __name__ == "__main__":
    main()

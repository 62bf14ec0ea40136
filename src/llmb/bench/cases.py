# SPDX-License-Identifier: Apache-2.0
"""What each microbenchmark measures, and what its timings mean. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmb.bench.jobs import (
    AttentionCase,
    Case,
    CopyCase,
    DeviceReport,
    LaunchCase,
    ProductCase,
    ProductDtype,
    Timing,
    TransferCase,
)
from llmb.bench.records import Measurement, NotMeasured
from llmb.bench.shapes import (
    PASS_WORDS,
    Weights,
    attention_dtype,
    attention_shapes,
    passes_of,
    product_case,
    product_text,
    weights_of,
)
from llmb.catalogue.records import Gpu, Recipe

KIB, MIB, GIB = 2**10, 2**20, 2**30
Device = Literal["cpu", "cuda"]
SQUARE: dict[Device, int] = {"cpu": 1024, "cuda": 8192}
"""A product that keeps the whole device busy, beside those of the recipe."""
COPY_BYTES: dict[Device, tuple[int, ...]] = {
    "cpu": (64 * KIB, MIB, 16 * MIB, 256 * MIB),
    "cuda": (64 * MIB, 512 * MIB, 2 * GIB),
}
TRANSFER_BYTES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
LAUNCHES: dict[Device, tuple[Literal["host", "device", "graph", "round_trip"], ...]] = {
    "cpu": ("host",),
    "cuda": ("host", "device", "graph", "round_trip"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A case to time, and what was done when it is."""

    benchmark: str
    label: str
    case: Case
    shape: str | None = None
    dtype: str | None = None
    size_bytes: int | None = None
    flops: float | None = None
    moved_bytes: int | None = None
    """Of memory, read and written; or transferred."""
    of_device_memory: bool = False
    weight: float = 0.0
    """FLOPs of all its calls in a micro-batch."""


def gemm_cases(recipe: Recipe, dtypes: Sequence[ProductDtype], device: Device, sustained_s: float) -> list[Asked]:
    """The products of one GPU for one micro-batch, and a square one. The one with the most FLOPs is sustained too."""
    found: list[Asked] = []
    for dtype in dtypes:
        products = [
            _product(weights, product_case(weights, dtype, training_pass))
            for weights in weights_of(recipe.model, recipe.layout)
            for training_pass in passes_of(recipe)
        ]
        size = SQUARE[device]
        square = Weights("square", size, size, size, 1, True)
        found += [*products, _product(square, product_case(square, dtype, "forward"))]
        if sustained_s:
            heaviest = max(products, key=lambda asked: asked.weight)
            found.append(_sustained(heaviest, sustained_s))
    return list(dict.fromkeys(found))


def _product(weights: Weights, case: ProductCase) -> Asked:
    label, shape = f"{weights.name}_{PASS_WORDS[case.training_pass]}", product_text(case)
    return Asked(
        benchmark="gemm",
        label=label,
        case=Case(name=f"{label}, {shape}, {case.dtype}", work=case),
        shape=shape,
        dtype=case.dtype,
        flops=case.flops,
        weight=case.flops * weights.count,
    )


def _sustained(asked: Asked, seconds: float) -> Asked:
    case = asked.case.model_copy(update={"sustained_s": seconds, "name": f"{asked.case.name}, for {seconds:g} s"})
    return replace(asked, case=case)


def attention_cases(recipe: Recipe, dtypes: Sequence[ProductDtype], sustained_s: float) -> Iterator[Asked]:
    """Forward and backward of each kind of layer; the forward pass of the first kind is sustained too."""
    for dtype in dtypes or (attention_dtype(recipe.dtype),):
        for number, shape in enumerate(attention_shapes(recipe)):
            for direction in ("forward", "backward"):
                work = AttentionCase.model_validate(
                    {
                        "batch": shape.batch,
                        "heads": shape.heads,
                        "kv_heads": shape.kv_heads,
                        "seq_len": shape.seq_len,
                        "head_dim": shape.head_dim,
                        "dtype": dtype,
                        "direction": direction,
                        "backend": "auto",
                    }
                )
                label = f"{shape.name}_{direction}"
                asked = Asked(
                    benchmark="attention",
                    label=label,
                    case=Case(name=f"{label}, {shape.text}, {dtype}", work=work),
                    shape=shape.text,
                    dtype=dtype,
                    flops=work.flops,
                )
                yield asked
                if sustained_s and not number and direction == "forward":
                    yield _sustained(asked, sustained_s)


def memory_cases(device: Device, sizes: Sequence[int], sustained_s: float) -> Iterator[Asked]:
    """Copies within the device's memory; the largest is sustained too."""
    sizes = sorted(sizes or COPY_BYTES[device])
    for size in sizes:
        work = CopyCase(size_bytes=size)
        asked = Asked(
            benchmark="memory",
            label="copy",
            case=Case(name=f"copy of {size:,} bytes", work=work),
            size_bytes=size,
            moved_bytes=2 * size,
            of_device_memory=True,
        )
        yield asked
        if sustained_s and size == sizes[-1]:
            yield _sustained(asked, sustained_s)


def transfer_cases(sizes: Sequence[int]) -> Iterator[Asked]:
    for direction in ("host_to_device", "device_to_host"):
        for pinned in (True, False):
            label = f"{direction}_{'pinned' if pinned else 'pageable'}"
            for size in sorted(sizes or TRANSFER_BYTES):
                work = TransferCase.model_validate({"size_bytes": size, "direction": direction, "pinned": pinned})
                name = f"{label}, {size:,} bytes"
                yield Asked("transfer", label, Case(name=name, work=work), size_bytes=size, moved_bytes=size)


def launch_cases(device: Device) -> Iterator[Asked]:
    for way in LAUNCHES[device]:
        yield Asked("launch", way, Case(name=f"launch, {way}", work=LaunchCase(way=way)))


def meaning(
    asked: Asked, timing: Timing, report: DeviceReport, node: str, gpu: Gpu | None, *, on_gpu: bool
) -> Measurement | NotMeasured:
    """The row of a timing. ``gpu`` is the catalogue's entry of the device, if it has one."""
    if timing.seconds is None:
        return NotMeasured(
            benchmark=asked.benchmark,
            case=asked.label,
            shape=asked.shape,
            dtype=asked.dtype,
            size_bytes=asked.size_bytes,
            reason=timing.reason or "unknown",
            out_of_memory=timing.out_of_memory,
        )
    peak_tflops, peak_bandwidth, reason = _peaks(asked, report, gpu)
    return Measurement(
        benchmark=asked.benchmark,
        case=asked.label,
        shape=asked.shape,
        dtype=asked.dtype,
        size_bytes=asked.size_bytes,
        node=node,
        device=report.device,
        time_s=timing.seconds,
        repetitions=timing.repeats,
        fastest_s=timing.fastest,
        slowest_s=timing.slowest,
        tflops=asked.flops / timing.seconds / 1e12 if asked.flops else None,
        peak_tflops=peak_tflops,
        peak_bandwidth_gb_per_s=peak_bandwidth,
        peak_reason=reason,
        bandwidth_gb_per_s=asked.moved_bytes / timing.seconds / 1e9 if asked.moved_bytes else None,
        sustained=asked.case.sustained_s is not None,
        backend=timing.backend,
        cpu_threads=None if on_gpu else report.cpu_threads,
    )


def _peaks(asked: Asked, report: DeviceReport, gpu: Gpu | None) -> tuple[float | None, float | None, str | None]:
    """Of arithmetic, of memory bandwidth, and why one that the case would be compared with is unknown."""
    if not asked.flops and not asked.of_device_memory:
        return None, None, None
    if gpu is None:
        return None, None, f"the catalogue has no peak of {report.device}"
    if asked.of_device_memory:
        return None, 1000 * gpu.memory_bandwidth_tb_s, None
    peak = gpu.peak_tflops.get(asked.dtype or "")
    return peak, None, None if peak else f"the catalogue has no {asked.dtype} peak of {gpu.gpu_type}"

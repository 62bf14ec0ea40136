# SPDX-License-Identifier: Apache-2.0
"""Selects the device, shapes and cases of a call of ``llmb bench``, and converts timings to measurements."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import llmb
from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError, unknown
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.layout_check import rank_model
from llmb.catalogue.records import Dtype, Gpu, Layout, Model, Recipe, gpu_type_of
from llmb.catalogue.resolve import CPU, Request, find_workload, gpu_types_of, resolve
from llmb.launch.site.site import Machine
from llmb.nodes.bench.measure import OnProgress, run_measurements
from llmb.nodes.bench.measurements import Measurement, MeasurementFile, NotMeasured
from llmb.nodes.bench.protocol import (
    PASSES,
    AttentionCase,
    Case,
    CaseList,
    CopyCase,
    DeviceReport,
    LaunchCase,
    ProductCase,
    ProductDtype,
    Timing,
    TransferCase,
)
from llmb.prediction.sizes import Product, block_products, head_product
from llmb.prediction.work import TrainingPass
from llmb.readers.samples.host import Device, host_name
from llmb.runs.record import now

PASS_WORDS: dict[TrainingPass, str] = {"forward": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
"""Megatron's terms for training passes, used in the names of cases."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The matrix products of a weight [n, k] with an input [m, k].

    ``count`` is the number of these products per micro-batch and training pass, over the layers of all pipeline stages
    and the experts of one GPU.
    """

    name: str
    m: int
    k: int
    n: int
    count: int
    in_fp8: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Causal attention over ``batch`` sequences, computed ``count`` times per micro-batch."""

    name: Literal["causal", "chunked"]
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    count: int

    @property
    def text(self) -> str:
        return f"{self.batch} x {self.seq_len}, {self.heads}:{self.kv_heads} heads x {self.head_dim}"


def weights_of(model: Model, layout: Layout) -> list[Weights]:
    counts: Counter[Product] = Counter()
    for experts, layers in Counter(map(model.is_moe_layer, range(model.layers))).items():
        for each in block_products(model, layout, experts=experts):
            counts[each._replace(together=1)] += layers * each.together
    weights = [Weights(each.name, each.rows, each.inner, each.columns, count, True) for each, count in counts.items()]
    head = head_product(model, layout)
    return [*weights, Weights(head.name, head.rows, head.inner, head.columns, 1, False)]


def passes_of(recipe: Recipe) -> tuple[TrainingPass, ...]:
    """Return the training passes of a recipe; with LoRA, weights are frozen and have no gradients."""
    return PASSES[:2] if recipe.task == "lora" else PASSES


def product_dtype(weights: Weights, dtype: ProductDtype) -> ProductDtype:
    """Return the dtype of a product in a recipe with ``dtype``; with FP8, the logits are in bf16."""
    return "bf16" if dtype == "fp8" and not weights.in_fp8 else dtype


def product_case(weights: Weights, dtype: ProductDtype, training_pass: TrainingPass) -> ProductCase:
    return ProductCase(
        m=weights.m, k=weights.k, n=weights.n, dtype=product_dtype(weights, dtype), training_pass=training_pass
    )


def product_text(case: ProductCase) -> str:
    """Format the shape of a product as rows of the result x inner dimension x columns of the result."""
    m, k, n = case.m, case.k, case.n
    sizes = {"forward": (m, k, n), "input_gradient": (m, n, k), "weight_gradient": (n, m, k)}
    return " x ".join(map(str, sizes[case.training_pass]))


def attention_shapes(recipe: Recipe) -> list[AttentionShape]:
    """Return the shapes of a recipe's attention over whole sequences, even with context parallelism.

    In layers with chunked attention, each chunk counts as a sequence.
    """
    layout, model = recipe.layout, rank_model(recipe.model, recipe.layout)
    whole = sum(map(model.is_global_layer, range(model.layers)))
    chunked = model.chunked_attention
    if chunked is None or layout.seq_len <= chunked.chunk_size:
        whole = model.layers
    heads = model.attention_heads, max(1, model.kv_heads)
    shapes = [AttentionShape("causal", layout.mbs, *heads, layout.seq_len, model.head_dim, whole)]
    if chunked and whole < model.layers:
        batch, others = layout.mbs * layout.seq_len // chunked.chunk_size, model.layers - whole
        shapes.append(AttentionShape("chunked", batch, *heads, chunked.chunk_size, model.head_dim, others))
    return [shape for shape in shapes if shape.count]


def attention_dtype(dtype: Dtype) -> ProductDtype:
    """Return the dtype of attention in a recipe with ``dtype``: fp32 for fp32, otherwise bf16."""
    return "fp32" if dtype is Dtype.FP32 else "bf16"


UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Convert a size such as 5GB (powers of ten) or 5GiB (powers of two) to bytes; raise UsageError if invalid."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match and (match[2] or not match[3]):
        size = round(float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].upper()])
    if size < 1:
        raise UsageError(f"'{text}' is not a valid size", do="pass a number and a unit, such as 512B, 64MiB or 1GB")
    return size


KIB, MIB, GIB = 2**10, 2**20, 2**30
SQUARE: dict[Device, int] = {"cpu": 1024, "cuda": 8192}
"""The number of rows and of columns in a square product, which keeps the whole device busy."""
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
class TimedCase:
    """A case to time, with the description and the amount of its work."""

    benchmark: str
    label: str
    case: Case
    shape: str | None = None
    dtype: str | None = None
    size_bytes: int | None = None
    flops: float | None = None
    moved_bytes: int | None = None
    """The number of bytes read and written, or transferred."""
    of_device_memory: bool = False
    weight: float = 0.0
    """FLOPs of all calls of a matrix product in a micro-batch."""


def gemm_cases(recipe: Recipe, dtypes: Sequence[ProductDtype], device: Device, sustained_s: float) -> list[TimedCase]:
    """Return one GPU's matrix products in a micro-batch, and a square one, in each dtype; with ``sustained_s``, the
    product with the most FLOPs in a micro-batch is also timed as sustained work."""
    cases: list[TimedCase] = []
    for dtype in dtypes:
        products = [
            _product(weights, product_case(weights, dtype, training_pass))
            for weights in weights_of(recipe.model, recipe.layout)
            for training_pass in passes_of(recipe)
        ]
        size = SQUARE[device]
        square = Weights("square", size, size, size, 1, True)
        cases += [*products, _product(square, product_case(square, dtype, "forward"))]
        if sustained_s:
            heaviest = max(products, key=lambda case: case.weight)
            cases.append(_sustained(heaviest, sustained_s))
    return list(dict.fromkeys(cases))


def _product(weights: Weights, case: ProductCase) -> TimedCase:
    label, shape = f"{weights.name}_{PASS_WORDS[case.training_pass]}", product_text(case)
    return TimedCase(
        benchmark="gemm",
        label=label,
        case=Case(name=f"{label}, {shape}, {case.dtype}", work=case),
        shape=shape,
        dtype=case.dtype,
        flops=case.flops,
        weight=case.flops * weights.count,
    )


def _sustained(timed: TimedCase, seconds: float) -> TimedCase:
    case = timed.case.model_copy(update={"sustained_s": seconds, "name": f"{timed.case.name}, for {seconds:g} s"})
    return replace(timed, case=case)


def attention_cases(recipe: Recipe, dtypes: Sequence[ProductDtype], sustained_s: float) -> Iterator[TimedCase]:
    """Yield attention of each kind of layer, forward and backward, in each of ``dtypes``, by default in the dtype of
    the recipe's attention; with ``sustained_s``, the first kind's forward pass is also timed as sustained work."""
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
                timed = TimedCase(
                    benchmark="attention",
                    label=label,
                    case=Case(name=f"{label}, {shape.text}, {dtype}", work=work),
                    shape=shape.text,
                    dtype=dtype,
                    flops=work.flops,
                )
                yield timed
                if sustained_s and not number and direction == "forward":
                    yield _sustained(timed, sustained_s)


def memory_cases(device: Device, sizes: Sequence[int], sustained_s: float) -> Iterator[TimedCase]:
    """Yield copies within the device's memory; with ``sustained_s``, the largest is also timed as sustained work."""
    sizes = sorted(sizes or COPY_BYTES[device])
    for size in sizes:
        work = CopyCase(size_bytes=size)
        timed = TimedCase(
            benchmark="memory",
            label="copy",
            case=Case(name=f"copy of {size:,} bytes", work=work),
            size_bytes=size,
            moved_bytes=2 * size,
            of_device_memory=True,
        )
        yield timed
        if sustained_s and size == sizes[-1]:
            yield _sustained(timed, sustained_s)


def transfer_cases(sizes: Sequence[int]) -> Iterator[TimedCase]:
    for direction in ("host_to_device", "device_to_host"):
        for pinned in (True, False):
            label = f"{direction}_{'pinned' if pinned else 'pageable'}"
            for size in sorted(sizes or TRANSFER_BYTES):
                work = TransferCase.model_validate({"size_bytes": size, "direction": direction, "pinned": pinned})
                name = f"{label}, {size:,} bytes"
                yield TimedCase("transfer", label, Case(name=name, work=work), size_bytes=size, moved_bytes=size)


def launch_cases(device: Device) -> Iterator[TimedCase]:
    for way in LAUNCHES[device]:
        yield TimedCase("launch", way, Case(name=f"launch, {way}", work=LaunchCase(way=way)))


def meaning(
    timed: TimedCase, timing: Timing, report: DeviceReport, node: str, gpu: Gpu | None, *, on_gpu: bool
) -> Measurement | NotMeasured:
    """Convert a timing to a row of results; ``gpu`` is the catalogue's entry for the device, if any."""
    if timing.seconds is None:
        return NotMeasured(
            benchmark=timed.benchmark,
            case=timed.label,
            shape=timed.shape,
            dtype=timed.dtype,
            size_bytes=timed.size_bytes,
            reason=timing.reason or "unknown",
            out_of_memory=timing.out_of_memory,
        )
    peak_tflops, peak_bandwidth, reason = _peaks(timed, report, gpu)
    return Measurement(
        benchmark=timed.benchmark,
        case=timed.label,
        shape=timed.shape,
        dtype=timed.dtype,
        size_bytes=timed.size_bytes,
        node=node,
        device=report.device,
        time_s=timing.seconds,
        repetitions=timing.repeats,
        fastest_s=timing.fastest,
        slowest_s=timing.slowest,
        tflops=timed.flops / timing.seconds / 1e12 if timed.flops else None,
        peak_tflops=peak_tflops,
        peak_bandwidth_gb_per_s=peak_bandwidth,
        peak_reason=reason,
        bandwidth_gb_per_s=timed.moved_bytes / timing.seconds / 1e9 if timed.moved_bytes else None,
        sustained=timed.case.sustained_s is not None,
        backend=timing.backend,
        cpu_threads=None if on_gpu else report.cpu_threads,
    )


def _peaks(timed: TimedCase, report: DeviceReport, gpu: Gpu | None) -> tuple[float | None, float | None, str | None]:
    """Return the peak TFLOPS and memory bandwidth in GB/s, and the reason if the relevant one is unknown."""
    if not timed.flops and not timed.of_device_memory:
        return None, None, None
    if gpu is None:
        return None, None, f"the catalogue has no peak for {report.device}"
    if timed.of_device_memory:
        return None, 1000 * gpu.memory_bandwidth_tb_s, None
    peak = gpu.peak_tflops.get(timed.dtype or "")
    return peak, None, None if peak else f"the catalogue has no {timed.dtype} peak for {gpu.gpu_type}"


DeviceChoice = Literal["auto", "cpu", "cuda"]
DEFAULT_MODEL: dict[Device, tuple[str, str]] = {
    "cpu": ("pretrain_llama3.1", "tiny"),
    "cuda": ("pretrain_llama3.1", "8b"),
}
BURST_S, MOST_REPEATS = 0.25, 200
"""A burst ends after this number of seconds or repetitions, but has at least ``CaseList.least_repeats``."""

SMALLER_SHAPE = "use a smaller shape: pass a smaller --mbs or --seq-len, or a larger --tp"
SMALLER = {
    **dict.fromkeys(("memory", "transfer"), "pass a smaller --size"),
    "collectives": "pass a smaller --max-size or --ranks",
}
"""Advice by benchmark if memory is exhausted, for sizes that do not come from a recipe."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a measurement; ``repeats`` is the number of calls in a burst, None for the limits of ``BURST_S``."""

    device: Device
    repeats: int | None
    command: tuple[str, ...]


def device_here(choice: DeviceChoice, machine: Machine) -> Device:
    """Return the device; for ``auto``, the GPU, if any. Raise EnvironmentProblem if the chosen GPU is missing."""
    if choice == "auto":
        return "cuda" if machine.gpu_names else "cpu"
    if choice == "cuda" and not machine.gpu_names:
        raise EnvironmentProblem("this machine has no visible GPU", do="pass --device cpu")
    return choice


def parse_dtypes(text: str | None) -> tuple[ProductDtype, ...]:
    """Parse dtypes separated by commas; raise UsageError if one is unknown, cannot be measured or occurs twice."""
    if text is None:
        return ()
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name in set(Dtype) and name not in get_args(ProductDtype):
            raise UsageError(f"{name} cannot be measured", choices=get_args(ProductDtype), do="pass another --dtype")
        if name not in get_args(ProductDtype):
            raise unknown("dtype", name, get_args(ProductDtype))
    if len(set(names)) < len(names):
        raise UsageError(f"--dtype is '{text}', which contains a dtype twice", do="pass each dtype once")
    return tuple(name for name in get_args(ProductDtype) if name in names)


def recipe_of(
    catalogue: Catalogue, request: Request, dtypes: Sequence[ProductDtype], device: Device, machine: Machine
) -> Recipe:
    """Return the recipe that determines the shapes. Raises the errors of ``resolved_here``, and UsageError if the model
    has parts that ``weights_of`` does not support."""
    recipe = resolved_here(catalogue, request, dtypes, device, machine)
    if parts := recipe.model.other_parts:
        what = f"the shapes of {recipe.model_name} cannot be measured, because the model has {', '.join(parts.names)}"
        raise UsageError(what, do="pass another --workload, or omit it")
    return recipe


def resolved_here(
    catalogue: Catalogue, request: Request, dtypes: Sequence[ProductDtype], device: Device, machine: Machine
) -> Recipe:
    """Return a recipe, by default for this machine's device. Its dtype is the first of ``dtypes`` that recipes can
    have, if any. Raises the errors of ``resolve``."""
    dtype = next((name for name in dtypes if name in set(Dtype)), None)
    gpu_type, notes = request.gpu_type, {}
    if gpu_type is None and device == "cuda":
        gpu_type = gpu_type_of(machine.gpu_names[0], catalogue.gpus.values())
    elif gpu_type is None and CPU in gpu_types_of(find_workload(catalogue, request.workload), request.size):
        gpu_type = CPU
    if gpu_type != request.gpu_type:
        notes = {"gpu_type": "detected"}
    return resolve(catalogue, replace(request, gpu_type=gpu_type, dtype=dtype), notes)


def measure(
    catalogue: Catalogue,
    cases: Sequence[TimedCase],
    settings: BenchSettings,
    on_progress: OnProgress,
    recipe: Recipe | None = None,
) -> MeasurementFile:
    """Time ``cases`` on the device, and return the measurements; raises the same errors as ``run_measurements``."""
    measured_at = now()
    timings = run_measurements(_job(cases, settings), on_progress)
    device, on_gpu = timings.device, settings.device == "cuda"
    gpu = catalogue.gpus.get(gpu_type_of(device.device, catalogue.gpus.values()) or "") if on_gpu else None
    node = host_name()
    rows = [
        meaning(one, timing, device, node, gpu, on_gpu=on_gpu)
        for one, timing in zip(cases, timings.timings, strict=True)
    ]
    versions = device.model_dump(include={"python", "torch", "cuda", "cudnn", "nccl", "driver"})
    return MeasurementFile(
        node=node,
        measured_at=measured_at,
        command=settings.command,
        software={"llmb": llmb.__version__, **versions},
        measurements=tuple(row for row in rows if isinstance(row, Measurement)),
        not_measured=tuple(row for row in rows if isinstance(row, NotMeasured)),
        recipe=recipe and recipe_text(recipe),
    )


def _job(timed: Sequence[TimedCase], settings: BenchSettings) -> CaseList:
    cases, repeats = tuple(one.case for one in timed), settings.repeats
    if repeats is None:
        return CaseList(device=settings.device, cases=cases, most_repeats=MOST_REPEATS, enough_s=BURST_S)
    return CaseList(device=settings.device, cases=cases, least_repeats=repeats, most_repeats=repeats)


def recipe_text(recipe: Recipe) -> str:
    """Describe a recipe and the parts of its layout that determine shapes."""
    layout = recipe.layout
    shards = [f"{name.upper()} {size}" for name in ("tp", "cp", "ep", "etp") if (size := getattr(layout, name)) > 1]
    return ", ".join([recipe.title(), f"MBS {layout.mbs}", f"sequence length {layout.seq_len}", *shards])


def raise_if_incomplete(measured: MeasurementFile) -> None:
    """Raise RunFailed if cases ran out of memory, or if nothing could be measured."""
    memory = [row for row in measured.not_measured if row.out_of_memory]
    if memory:
        raise RunFailed(
            f"out of memory: {'; '.join(map(_named, memory))}",
            where=memory[0].reason,
            do=SMALLER_SHAPE if measured.recipe else SMALLER.get(memory[0].benchmark, SMALLER_SHAPE),
        )
    if not measured.measurements:
        reasons = dict.fromkeys(row.reason for row in measured.not_measured)
        raise RunFailed("nothing could be measured", where="; ".join(reasons) or None)


def _named(row: NotMeasured) -> str:
    size = None if row.size_bytes is None else f"{row.size_bytes:,} bytes"
    return " ".join(filter(None, (row.case, row.shape, row.dtype, size)))

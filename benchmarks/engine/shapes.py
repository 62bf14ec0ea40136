# SPDX-License-Identifier: Apache-2.0
"""The matrix products and attention that a model needs, and their time at measured speeds. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmb.catalogue.records import Dtype, Recipe, Record
from llmb.nodes.bench.device_bench import Weights, attention_dtype, parse_dtypes, product_case, weights_of
from llmb.nodes.bench.protocol import (
    PASSES,
    AttentionCase,
    Case,
    CaseList,
    CopyCase,
    DeviceReport,
    ProductCase,
    Timing,
    Timings,
)
from llmb.runs.attention_choice import BACKENDS as GPU_BACKENDS

BACKENDS = tuple(name for name in GPU_BACKENDS["cuda"] if name not in ("varlen", "efficient", "math"))
"""Of attention of whole sequences on a GPU; a CPU has the engine's choice."""
LISTS = ("products", "attention", "sustained")
"""What is measured of many shapes."""
SUSTAINED_S = {"cuda": 2.0, "cpu": 0.1}
"""A GPU under load lowers its clock after about a second, when it reaches its power limit."""


class Floor(Record):
    """The minimum time of one micro-batch at the measured speed of kernels: only matrix products and attention.

    ``products_tflops`` is the rate of all matrix products together, and ``sustained`` the fraction of its rate that the
    largest one keeps for seconds. None if a kernel could not be measured.
    """

    name: str
    dtype: Dtype
    products_s: float | None
    products_tflops: float | None
    sustained: float | None = None
    attention_s: float | None
    attention_backend: str | None
    reason: str | None


def request_of(recipes: Sequence[Recipe], device: str, copy_bytes: int) -> dict[str, Any]:
    """What has to be measured for these recipes, each shape once."""
    products = {tuple(item.items()): item for recipe in recipes for _, item in products_of(recipe)}
    attention = {tuple(item.items()): item for item in map(attention_of, recipes)}
    sustained = {tuple(item.items()): item for item in map(largest_product, recipes)}
    return {
        "device": device,
        "products": list(products.values()),
        "sustained": list(sustained.values()),
        "attention": list(attention.values()),
        "copy_bytes": copy_bytes,
    }


def products_of(recipe: Recipe) -> Iterator[tuple[Weights, dict[str, Any]]]:
    """Each weight's three passes."""
    (dtype,) = parse_dtypes(recipe.dtype)
    for weights in weights_of(recipe.model, recipe.layout):
        for training_pass in PASSES:
            yield weights, product_case(weights, dtype, training_pass).model_dump(exclude={"kind"})


def largest_product(recipe: Recipe) -> dict[str, Any]:
    """Of those in the recipe's own dtype: with FP8 the head stays in bf16."""
    own = [item for _, item in products_of(recipe) if item["dtype"] == recipe.dtype]
    return max(own, key=lambda item: ProductCase(**item).flops)


def attention_of(recipe: Recipe) -> dict[str, Any]:
    """As if all layers had full attention."""
    model, layout = recipe.model, recipe.layout
    return {
        "batch": layout.mbs,
        "heads": model.attention_heads,
        "kv_heads": model.kv_heads,
        "seq_len": layout.seq_len,
        "head_dim": model.head_dim,
        "dtype": attention_dtype(recipe.dtype),
    }


def job_of(request: Mapping[str, Any]) -> CaseList:
    """A copy, all products, attention with every backend, forward and both passes, then what is sustained."""
    works: list[CopyCase | ProductCase | AttentionCase] = [CopyCase(size_bytes=request["copy_bytes"])]
    works += [ProductCase(**shape) for shape in request["products"]]
    works += [AttentionCase(**shape, **way) for shape in request["attention"] for way in _ways(request["device"])]
    cases = [Case(name=f"{work.kind} {number}", work=work) for number, work in enumerate(works)]
    seconds = SUSTAINED_S[request["device"]]
    cases += [
        Case(name=f"sustained {number}", work=ProductCase(**shape), sustained_s=seconds)
        for number, shape in enumerate(request["sustained"])
    ]
    return CaseList(device=request["device"], cases=tuple(cases))


def _ways(device: str) -> Iterator[dict[str, Any]]:
    for backend in BACKENDS if device == "cuda" else ("auto",):
        yield {"backend": backend, "direction": "forward"}
        yield {"backend": backend, "direction": "both"}


def measured_of(job: CaseList, timings: Timings) -> dict[str, Any]:
    """What was measured, in the form of the comparison's document."""
    rows: dict[str, Any] = {"environment": _environment(timings.device), **{name: [] for name in LISTS}}
    for case, timing in zip(job.cases, timings.timings, strict=True):
        work = case.work
        if isinstance(work, CopyCase):
            seconds = timing.seconds
            rate = None if seconds is None else 2 * work.size_bytes / seconds / 1e9
            rows["copy"] = {"bytes": work.size_bytes, "gb_s": rate, **_figures(timing)}
        elif isinstance(work, ProductCase):
            kind = "products" if case.sustained_s is None else "sustained"
            rows[kind].append({**work.model_dump(exclude={"kind"}), **_rated(timing, work.flops)})
        elif isinstance(work, AttentionCase):
            shape = work.model_dump(exclude={"kind", "direction", "backend"})
            way = {"backend": timing.backend or work.backend, "backward": work.direction == "both"}
            rows["attention"].append({**shape, **way, **_rated(timing, work.flops)})
    return rows


def _environment(device: DeviceReport) -> dict[str, Any]:
    named = device.model_dump(include={"torch", "cuda", "device", "device_memory_gib", "cpu_threads"})
    return {**named, "cudnn": device.cudnn_number}


def _figures(timing: Timing) -> dict[str, Any]:
    return timing.model_dump(include={"seconds", "fastest", "slowest", "repeats", "reason"})


def _rated(timing: Timing, flops: float) -> dict[str, Any]:
    seconds = timing.seconds
    return {**_figures(timing), "tflops": None if seconds is None else flops / seconds / 1e12}


def floor_of(name: str, recipe: Recipe, measured: Mapping[str, Any]) -> Floor:
    """The time of one micro-batch of ``recipe``, from what was measured."""
    seconds, flops, reason = 0.0, 0.0, None
    for weights, wanted in products_of(recipe):
        found = _row(measured["products"], wanted)
        if found is None or found["seconds"] is None:
            reason = f"{weights.name}: {found['reason'] if found else 'not measured'}"
            break
        seconds += weights.count * found["seconds"]
        flops += weights.count * ProductCase(**wanted).flops
    shape = attention_of(recipe)
    passes = [
        row
        for row in measured["attention"]
        if shape.items() <= row.items() and row["backward"] and row["seconds"] is not None
    ]
    best = min(passes, key=lambda row: float(row["seconds"]), default=None)
    return Floor(
        name=name,
        dtype=recipe.dtype,
        products_s=None if reason else seconds,
        products_tflops=None if reason else flops / seconds / 1e12,
        sustained=_sustained(recipe, measured),
        attention_s=best["seconds"] * recipe.model.layers if best else None,
        attention_backend=best["backend"] if best else None,
        reason=reason or (None if best else "attention could not be measured"),
    )


def _sustained(recipe: Recipe, measured: Mapping[str, Any]) -> float | None:
    """At most 1: a burst has its operands read from memory, and those of a loop may lie in the cache."""
    wanted = largest_product(recipe)
    burst, loop = _row(measured["products"], wanted), _row(measured["sustained"], wanted)
    if burst is None or loop is None or burst["seconds"] is None or loop["seconds"] is None:
        return None
    return min(1.0, float(burst["seconds"]) / float(loop["seconds"]))


def _row(rows: Sequence[dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((row for row in rows if wanted.items() <= row.items()), None)

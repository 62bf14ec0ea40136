# SPDX-License-Identifier: Apache-2.0
"""Throughput, FLOP rate, MFU and time to train, from a step time."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmb.catalogue.records import Convention, Lora, Packing, Recipe
from llmb.metrics.model_counts import flops_per_sequence

SECONDS_PER_DAY = 86_400
MOST_MFU_PCT = 100.0
MFU = "mfu_pct"
"""The name of the figure in ``reasons``."""
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Throughput:
    """The metrics that follow from a step time. Each None has its reason in ``reasons`` under the same name."""

    step_time_s: float
    tokens_per_s: float
    """Rate of all places, with padding."""
    tokens_per_s_per_gpu: float
    real_tokens_per_s: float
    """Rate of the places that documents take; the same if sequences are not packed."""
    flops_per_sequence: dict[str, float | None]
    tflops_per_gpu: dict[str, float | None]
    mfu_pct: dict[str, float | None]
    peak_tflops: float | None
    days_per_1t_tokens: float | None
    reasons: dict[str, str]


def throughput(
    recipe: Recipe, step_time_s: float, *, lora: Lora | None = None, packing: Packing | None = None
) -> Throughput:
    """The metrics of ``recipe`` at ``step_time_s`` seconds per step, with the FLOPs of the adapters of ``lora``.

    ``packing`` has the statistics of sequences that were trained, if they are known, instead of the recipe's.
    tokens/s = GBS x sequence length / step time; MFU = GBS x model FLOPs / (step time x GPUs x peak).
    """
    layout = recipe.layout
    tokens_per_s = layout.gbs * layout.seq_len / step_time_s
    counted = {item.value: flops_per_sequence(recipe, item, lora=lora, packing=packing) for item in Convention}
    known = packing or recipe.packing
    per_gpu = layout.gbs / step_time_s / layout.gpus / TERA
    tflops = {name: None if value is None else value * per_gpu for name, value in counted.items()}
    peak = recipe.peak_tflops
    too_fast = why_too_fast(tflops, peak)
    mfu = {
        name: None if value is None or peak is None or value > peak else 100 * value / peak
        for name, value in tflops.items()
    }
    return Throughput(
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / layout.gpus,
        real_tokens_per_s=layout.gbs * known.tokens / step_time_s if known else tokens_per_s,
        flops_per_sequence=counted,
        tflops_per_gpu=tflops,
        mfu_pct=mfu,
        peak_tflops=peak,
        days_per_1t_tokens=None if recipe.proxy else 1e12 / tokens_per_s / SECONDS_PER_DAY,
        reasons=_reasons(recipe, counted) | ({MFU: too_fast} if too_fast else _beyond_peak(tflops, peak)),
    )


def why_too_fast(tflops_per_gpu: Mapping[str, float | None], peak_tflops: float | None) -> str | None:
    """Why a step time cannot be true, whatever the convention: the one that counts the least is above the peak."""
    known = {name: value for name, value in tflops_per_gpu.items() if value is not None}
    if not known or not peak_tflops:
        return None
    name = min(known, key=known.__getitem__)
    pct = 100 * known[name] / peak_tflops
    if pct <= MOST_MFU_PCT:
        return None
    return f"the MFU would be {pct:.4g} % ({name}): the step time, the work of a step or the GPU is another than told"


def _beyond_peak(tflops: Mapping[str, float | None], peak: float | None) -> dict[str, str]:
    """Conventions that count so much work that is not done, such as masked attention, that no MFU can be told."""
    beyond = [name for name, value in tflops.items() if value and peak and value > peak]
    return {f"{MFU}.{name}": "above the peak, as it counts work that is not done" for name in beyond}


def _reasons(recipe: Recipe, flops: dict[str, float | None]) -> dict[str, str]:
    reasons = {}
    if flops[Convention.PUBLISHED] is None:
        reasons["published"] = f"no document counts the FLOPs of {recipe.workload} {recipe.size} in this shape"
    if flops[Convention.PACKED] is None:
        reasons["packed"] = unpacked_reason(recipe)
    if recipe.peak_tflops is None:
        device = "a CPU" if recipe.gpu_type == "cpu" else recipe.gpu_type
        reasons[MFU] = f"the catalogue has no {recipe.dtype} peak for {device}"
    if recipe.proxy:
        reasons["days_per_1t_tokens"] = f"a proxy is not the model: {recipe.proxy_text}"
    return reasons


def unpacked_reason(recipe: Recipe) -> str:
    """Why FLOPs of packed sequences are not known."""
    if recipe.task == "pretrain":
        return "sequences are not packed from documents"
    return f"no statistics of packed sequences of {recipe.layout.seq_len} tokens are known"

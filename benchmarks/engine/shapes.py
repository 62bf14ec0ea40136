# SPDX-License-Identifier: Apache-2.0
"""The matrix products and attention that a model needs, and their time at measured speeds. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmb.catalogue.records import Dtype, Model, Recipe, Record
from llmb.metrics.parameters import MATRICES

PASSES = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, slots=True)
class Weights:
    """The products of one weight matrix, [n, k], with [m, k] inputs, ``count`` times per micro-batch."""

    name: str
    m: int
    k: int
    n: int
    count: int
    in_fp8: bool


class Floor(Record):
    """The minimum time of one micro-batch at the measured speed of kernels: only matrix products and attention.

    ``products_tflops`` is the rate of all matrix products together. None if a kernel could not be measured.
    """

    name: str
    dtype: Dtype
    products_s: float | None
    products_tflops: float | None
    attention_s: float | None
    attention_backend: str | None
    reason: str | None


def weights_of(model: Model, tokens: int) -> list[Weights]:
    """Query, key and value count as one product, as do gate and up: the largest that an engine can fuse."""
    hidden, queries = model.hidden_size, model.attention_heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    ups = MATRICES[model.mlp] - 1
    layers = model.layers
    experts = sum(model.is_moe_layer(layer) for layer in range(layers))
    found = [
        Weights("qkv", tokens, hidden, queries + 2 * keys, layers, True),
        Weights("attention output", tokens, queries, hidden, layers, True),
        *_feed_forward("ffn", tokens, hidden, model.ffn_hidden_size, ups, layers - experts),
        Weights("head", tokens, hidden, model.vocab_size, 1, False),
    ]
    if model.moe:
        moe = model.moe
        each = tokens * moe.top_k // moe.experts
        shared = moe.shared_ffn_hidden_size
        found += _feed_forward("shared expert", tokens, hidden, shared or 0, ups, experts if shared else 0)
        found += _feed_forward("expert", each, hidden, moe.ffn_hidden_size, ups, experts * moe.experts)
    return [weights for weights in found if weights.count]


def _feed_forward(name: str, tokens: int, hidden: int, inner: int, ups: int, count: int) -> Iterator[Weights]:
    yield Weights(f"{name} up", tokens, hidden, ups * inner, count, True)
    yield Weights(f"{name} down", tokens, inner, hidden, count, True)


def request_of(recipes: Sequence[Recipe], device: str, copy_bytes: int) -> dict[str, Any]:
    """What ``ceilings`` has to measure for these recipes, each shape once."""
    products = {tuple(item.items()): item for recipe in recipes for _, item in products_of(recipe)}
    attention = {tuple(item.items()): item for item in map(attention_of, recipes)}
    return {
        "device": device,
        "products": list(products.values()),
        "attention": list(attention.values()),
        "copy_bytes": copy_bytes,
    }


def products_of(recipe: Recipe) -> Iterator[tuple[Weights, dict[str, Any]]]:
    """Each weight's three passes; with FP8, the head stays in bf16."""
    layout = recipe.layout
    for weights in weights_of(recipe.model, layout.mbs * layout.seq_len):
        dtype = "bf16" if recipe.dtype is Dtype.FP8 and not weights.in_fp8 else str(recipe.dtype)
        for training_pass in PASSES:
            shape = {"m": weights.m, "k": weights.k, "n": weights.n}
            yield weights, {**shape, "dtype": dtype, "training_pass": training_pass}


def attention_of(recipe: Recipe) -> dict[str, Any]:
    """Attention is computed in bf16 if matrix products are in FP8."""
    model, layout = recipe.model, recipe.layout
    return {
        "batch": layout.mbs,
        "heads": model.attention_heads,
        "kv_heads": model.kv_heads,
        "seq_len": layout.seq_len,
        "head_dim": model.head_dim,
        "dtype": "fp32" if recipe.dtype is Dtype.FP32 else "bf16",
    }


def floor_of(name: str, recipe: Recipe, measured: Mapping[str, Any]) -> Floor:
    """The time of one micro-batch of ``recipe``, from the measurements of ``ceilings``."""
    seconds, flops, reason = 0.0, 0.0, None
    for weights, wanted in products_of(recipe):
        found = next((row for row in measured["products"] if wanted.items() <= row.items()), None)
        if found is None or found["seconds"] is None:
            reason = f"{weights.name}: {found['reason'] if found else 'not measured'}"
            break
        seconds += weights.count * found["seconds"]
        flops += weights.count * 2 * weights.m * weights.k * weights.n
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
        attention_s=best["seconds"] * recipe.model.layers if best else None,
        attention_backend=best["backend"] if best else None,
        reason=reason or (None if best else "attention could not be measured"),
    )

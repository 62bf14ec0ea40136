# SPDX-License-Identifier: Apache-2.0
"""The matrix products and attention of one GPU for one micro-batch of a recipe. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmb.bench.jobs import PASSES, ProductCase, ProductDtype, TrainingPass
from llmb.catalogue.records import Dtype, Layout, Model, Recipe
from llmb.metrics.parameters import MATRICES

PASS_WORDS: dict[TrainingPass, str] = {"forward": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
"""As Megatron calls them; the words of cases."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The products of one weight matrix, [n, k], with [m, k] inputs, ``count`` times per micro-batch.

    ``count`` is over the layers of all pipeline stages, and the experts of one GPU.
    """

    name: str
    m: int
    k: int
    n: int
    count: int
    in_fp8: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Causal attention of ``batch`` sequences, ``count`` times per micro-batch."""

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
    """Query, key and value count as one product, as do gate and up: the largest that an engine can fuse.

    Tensor parallelism shards outputs of the first and inputs of the second product of a block; context parallelism the
    tokens. Experts get as many tokens as if all were chosen equally often.
    """
    tokens, tp = layout.mbs * layout.seq_len // layout.cp, layout.tp
    hidden, queries = model.hidden_size, model.attention_heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    layers = model.layers
    expert_layers = sum(model.is_moe_layer(layer) for layer in range(layers))
    found = [
        Weights("qkv", tokens, hidden, (queries + 2 * keys) // tp, layers, True),
        Weights("attention_output", tokens, queries // tp, hidden, layers, True),
        *_feed_forward("", tokens, model, model.ffn_hidden_size // tp, layers - expert_layers),
        Weights("logits", tokens, hidden, model.vocab_size // tp, 1, False),
    ]
    if model.moe:
        moe, shared = model.moe, model.moe.shared_ffn_hidden_size
        # The GPUs that share the experts send each other the tokens of all.
        each = tokens * layout.etp * layout.ep * moe.top_k // (tp * moe.experts)
        own = expert_layers * moe.experts // layout.ep
        found += _feed_forward("shared_", tokens, model, (shared or 0) // tp, expert_layers if shared else 0)
        found += _feed_forward("expert_", each, model, moe.ffn_hidden_size // layout.etp, own)
    return [weights for weights in found if weights.count]


def _feed_forward(prefix: str, tokens: int, model: Model, inner: int, count: int) -> Iterator[Weights]:
    ups = MATRICES[model.mlp] - 1
    yield Weights(f"{prefix}{'gate_up' if ups > 1 else 'up'}", tokens, model.hidden_size, ups * inner, count, True)
    yield Weights(f"{prefix}down", tokens, inner, model.hidden_size, count, True)


def passes_of(recipe: Recipe) -> tuple[TrainingPass, ...]:
    """Frozen weights have no gradient."""
    return PASSES[:2] if recipe.task == "lora" else PASSES


def product_dtype(weights: Weights, dtype: ProductDtype) -> ProductDtype:
    """With FP8, the logits stay in bf16."""
    return "bf16" if dtype == "fp8" and not weights.in_fp8 else dtype


def product_case(weights: Weights, dtype: ProductDtype, training_pass: TrainingPass) -> ProductCase:
    return ProductCase(
        m=weights.m,
        k=weights.k,
        n=weights.n,
        dtype=product_dtype(weights, dtype),
        training_pass=training_pass,
    )


def product_text(case: ProductCase) -> str:
    """Rows of the result, what is summed over, columns of the result."""
    m, k, n = case.m, case.k, case.n
    sizes = {"forward": (m, k, n), "input_gradient": (m, n, k), "weight_gradient": (n, m, k)}
    return " x ".join(map(str, sizes[case.training_pass]))


def attention_shapes(recipe: Recipe) -> list[AttentionShape]:
    """Of whole sequences: with context parallelism, a GPU does its part of each.

    Layers with chunked attention see each chunk as a sequence.
    """
    model, layout = recipe.model, recipe.layout
    whole = sum(map(model.is_global_layer, range(model.layers)))
    chunked = model.chunked_attention
    if chunked is None or layout.seq_len <= chunked.chunk_size:
        whole = model.layers
    heads, kv_heads = model.attention_heads // layout.tp, max(1, model.kv_heads // layout.tp)
    found = [AttentionShape("causal", layout.mbs, heads, kv_heads, layout.seq_len, model.head_dim, whole)]
    if chunked and whole < model.layers:
        batch = layout.mbs * layout.seq_len // chunked.chunk_size
        others = model.layers - whole
        found.append(AttentionShape("chunked", batch, heads, kv_heads, chunked.chunk_size, model.head_dim, others))
    return [shape for shape in found if shape.count]


def attention_dtype(dtype: Dtype) -> ProductDtype:
    """Attention is computed in bf16 if matrix products are in FP8."""
    return "fp32" if dtype is Dtype.FP32 else "bf16"

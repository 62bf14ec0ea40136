# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of one training sequence, forward and backward, under named conventions.

Multiplying an m x k by a k x n matrix counts 2mkn. The backward pass of a trained weight costs twice its forward pass,
for the gradients of its input and of itself; that of a frozen weight (LoRA's base model) costs one. Recomputation never
counts (Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").
"""

from llmb.catalogue.published import PublishedFlops
from llmb.catalogue.records import Convention, Lora, Model, Packing, Recipe
from llmb.metrics.parameters import MATRICES, trainable_parameters

PASSES = 3
FROZEN_PASSES = 2


def flops_per_sequence(
    recipe: Recipe, convention: Convention, *, lora: Lora | None = None, packing: Packing | None = None
) -> float | None:
    """Model FLOPs of one sequence of ``recipe``, without padding in ``packed``.

    ``lora`` adds the FLOPs of these adapters, except in ``published``; ``packing`` replaces the recipe's statistics.
    None if no reference document counts them (``published``), or if there are no statistics (``packed``).
    """
    model, seq_len = recipe.model, recipe.layout.seq_len
    if convention == Convention.PUBLISHED:
        return None if recipe.published_flops is None else published_flops(model, seq_len, recipe.published_flops)
    frozen = recipe.task == "lora"
    if convention != Convention.PACKED:
        base = model_flops(model, seq_len, causal=convention == Convention.CAUSAL, frozen=frozen)
        return base + adapter_flops(model, lora, seq_len)
    known = packing or recipe.packing
    if known is None:
        return None
    base = model_flops(model, seq_len, causal=False, frozen=frozen, packing=known)
    return base + adapter_flops(model, lora, known.tokens)


def adapter_flops(model: Model, lora: Lora | None, tokens: float) -> float:
    """FLOPs of the adapters' own products for ``tokens``: one multiplication of each token with each parameter."""
    return PASSES * 2 * trainable_parameters(model, lora) * tokens if lora else 0.0


def model_flops(
    model: Model, seq_len: int, *, causal: bool, frozen: bool = False, packing: Packing | None = None
) -> float:
    """Model FLOPs of one sequence of ``seq_len`` tokens.

    ``causal`` counts the half of the attention square that a causal model needs, otherwise the full square counts.
    ``frozen`` leaves out weight gradients: two thirds of the weight products remain (attention has no weights).
    ``packing`` replaces the tokens by those of the documents, and the square of the length by the documents' sum of
    squared lengths (of their attention chunks).
    """
    tokens = packing.tokens if packing else seq_len
    passes = FROZEN_PASSES if frozen else PASSES
    weights = sum(_layer_weights(model, layer) for layer in range(model.layers)) + model.hidden_size * model.vocab_size
    scores = sum(
        attention_square(model, model.is_global_layer(layer), seq_len, packing) for layer in range(model.layers)
    )
    width = model.attention_heads * model.head_dim
    return passes * 2 * weights * tokens + PASSES * 4 * width * scores * (0.5 if causal else 1.0)


def published_flops(model: Model, seq_len: int, source: PublishedFlops) -> float:
    """The count of the source document: the value it prints, else the value of its formula, errors included."""
    if source.printed_flops is not None:
        return source.printed_flops
    as_published = model.model_copy(update=source.as_published)
    if source.formula == "two thirds of causal":
        return model_flops(as_published, seq_len, causal=True) * 2 / 3
    return model_flops(as_published, seq_len, causal=source.formula == "causal")


def _layer_weights(model: Model, layer: int) -> int:
    """Weights of one layer that a token is multiplied with (without the router, which is under 0.5 %, as is usual)."""
    hidden = model.hidden_size
    attention = 2 * hidden * model.head_dim * (model.attention_heads + model.kv_heads)
    matrices = MATRICES[model.mlp]
    moe = model.moe
    if moe is None or not model.is_moe_layer(layer):
        return attention + matrices * hidden * model.ffn_hidden_size
    active = moe.top_k * moe.ffn_hidden_size + (moe.shared_ffn_hidden_size or 0)
    return attention + matrices * hidden * active


def attention_square(model: Model, attends_all: bool, seq_len: int, packing: Packing | None) -> float:
    """Pairs of positions that a layer with global, or with chunked attention compares in a sequence, without
    subtracting the causal half."""
    chunked = model.chunked_attention
    if packing:
        cut = packing.chunked_sum_of_squares
        return packing.sum_of_squares if cut is None or attends_all else cut
    if chunked is None or attends_all or seq_len <= chunked.chunk_size:
        return seq_len**2
    chunks, rest = divmod(seq_len, chunked.chunk_size)
    return chunks * chunked.chunk_size**2 + rest**2

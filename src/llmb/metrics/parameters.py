# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a model from its record alone."""

from llmb.catalogue.records import Mlp, Model

MATRICES: dict[Mlp, int] = {"swiglu": 3, "squared-relu": 2}
"""Of a feed-forward layer."""


def parameter_count(model: Model) -> tuple[int, int]:
    """Total parameters, and active parameters, in which only the experts that the router chooses count.

    Both include the embedding and the head, once where they are one matrix.
    """
    vocabularies = 1 if model.tied_embeddings else 2
    outside = vocabularies * model.vocab_size * model.hidden_size + _norm(model)
    total, active = outside, outside
    for layer in range(model.layers):
        always = _attention(model) + 2 * _norm(model)
        every_expert, chosen_experts = _feed_forward(model, layer)
        total += always + every_expert
        active += always + chosen_experts
    return total, active


def checkpoint_bytes(model: Model) -> int:
    """An estimate: each parameter is saved in fp32, with the two AdamW moments."""
    return 4 * 3 * parameter_count(model)[0]


def _attention(model: Model) -> int:
    per_head_norms = 2 * model.head_dim if model.qk_norm else 0
    return 2 * model.hidden_size * model.head_dim * (model.attention_heads + model.kv_heads) + per_head_norms


def _norm(model: Model) -> int:
    weight_and_bias = 2 if model.norm == "layernorm1p" else 1
    return weight_and_bias * model.hidden_size


def _feed_forward(model: Model, layer: int) -> tuple[int, int]:
    """Parameters with all experts, and with the chosen ones."""
    matrices = MATRICES[model.mlp]
    if model.moe is None or not model.is_moe_layer(layer):
        dense = matrices * model.hidden_size * model.ffn_hidden_size
        return dense, dense
    moe = model.moe
    expert = matrices * model.hidden_size * moe.ffn_hidden_size
    always = model.hidden_size * (moe.experts + matrices * (moe.shared_ffn_hidden_size or 0))
    return always + moe.experts * expert, always + moe.top_k * expert

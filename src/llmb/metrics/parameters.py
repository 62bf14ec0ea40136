# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a model from its record alone."""

from llmb.catalogue.records import Model


def parameter_count(model: Model) -> tuple[int, int]:
    """Total parameters, and active parameters, in which only the experts that the router chooses count.

    Both include the embedding and the head.
    """
    outside = 2 * model.vocab_size * model.hidden_size + _norm(model)
    total, active = outside, outside
    for layer in range(model.layers):
        always = _attention(model) + 2 * _norm(model)
        every_expert, chosen_experts = _feed_forward(model, layer)
        total += always + every_expert
        active += always + chosen_experts
    return total, active


def _attention(model: Model) -> int:
    return 2 * model.hidden_size * model.head_dim * (model.attention_heads + model.kv_heads)


def _norm(model: Model) -> int:
    weight_and_bias = 2 if model.architecture == "nemotron4" else 1
    return weight_and_bias * model.hidden_size


def _feed_forward(model: Model, layer: int) -> tuple[int, int]:
    """Parameters with all experts, and with the chosen ones."""
    matrices = 3 if model.gated_mlp else 2
    if model.moe is None or not model.is_moe_layer(layer):
        dense = matrices * model.hidden_size * model.ffn_hidden_size
        return dense, dense
    moe = model.moe
    expert = matrices * model.hidden_size * moe.ffn_hidden_size
    always = model.hidden_size * (moe.experts + matrices * moe.shared_ffn_hidden_size)
    return always + moe.experts * expert, always + moe.top_k * expert

# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a model from its record alone."""

from llmb.catalogue.records import ADAPTED, Lora, Mlp, Model

MATRICES: dict[Mlp, int] = {"swiglu": 3, "squared-relu": 2}
"""Matrices of a feed-forward layer."""


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


def trainable_parameters(model: Model, lora: Lora | None) -> int:
    """Parameters that have gradients and optimizer state: those of the adapters, or all if there are none.

    Of a model without experts if feed-forward layers have adapters.
    """
    if lora is None:
        return parameter_count(model)[0]
    shapes = _linear_shapes(model)
    adapted = [shapes[name] for name in ADAPTED[lora.targets] if name in shapes]
    # Each layer has its rows of B; a fused adapter has one A for all its layers.
    inputs = model.hidden_size if lora.fused else sum(inputs for inputs, _ in adapted)
    return model.layers * lora.rank * (inputs + sum(outputs for _, outputs in adapted))


def checkpoint_bytes(model: Model, lora: Lora | None = None) -> int:
    """An estimate: each trainable parameter is saved in fp32, with the two AdamW moments."""
    return 4 * 3 * trainable_parameters(model, lora)


def _linear_shapes(model: Model) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers of a block without experts."""
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    queries, keys = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    shapes |= {"o_proj": (queries, hidden), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return shapes | ({"gate_proj": (hidden, inner)} if model.mlp == "swiglu" else {})


def _attention(model: Model) -> int:
    per_head_norms = 2 * model.head_dim if model.qk_norm else 0
    matrices = 2 * model.hidden_size * model.head_dim * (model.attention_heads + model.kv_heads)
    return matrices + per_head_norms + _biases(model)


def _biases(model: Model) -> int:
    """Biases of one layer. A bias has an element for each output of its matrix."""
    outputs = {name: outputs for name, (_, outputs) in _linear_shapes(model).items()}
    attention = {"q_proj": model.qkv_bias, "k_proj": model.qkv_bias, "v_proj": model.qkv_bias}
    attention |= {"o_proj": model.attention_output_bias}
    return sum(count for name, count in outputs.items() if attention.get(name, model.mlp_bias))


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

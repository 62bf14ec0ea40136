# SPDX-License-Identifier: Apache-2.0
"""Routed experts with a capacity by the definition of Megatron-LM, written from its code alone.

``topk_softmax_with_capacity`` and ``get_capacity`` of megatron/core/transformer/moe/moe_utils.py and
``moe_apply_probs_on_input`` of experts.py, commit 64cb6bd, with ``moe_pad_expert_input_to_capacity`` and the drop
policy ``probs``. Every expert computes all tokens here, and masks say which of them count.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def capacity_of(tokens: int, top_k: int, experts: int, factor: float) -> int:
    return min(math.ceil(tokens * top_k / experts * factor), tokens)


def probabilities(logits: Tensor, top_k: int, factor: float, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Of each token for each expert, zero where it is not computed, and which choices were dropped: [n, experts]."""
    scores = torch.sigmoid(logits) if sigmoid else logits
    values, indices = torch.topk(scores, k=top_k, dim=1)
    probs = values if sigmoid else torch.softmax(values, dim=-1)
    gates = torch.zeros_like(logits).scatter(1, indices, probs)
    chosen = torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
    capacity = capacity_of(len(logits), top_k, logits.shape[1], factor)
    _, kept = torch.topk(gates, k=capacity, dim=0, sorted=False)
    mask = torch.zeros_like(logits).scatter(0, kept, 1).bool()
    return gates * mask, chosen & ~mask


def routed(
    tokens: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, factor: float, *, sigmoid: bool
) -> tuple[Tensor, int]:
    """The sum of the experts' outputs, [n, hidden], and the number of dropped choices.

    router: [experts, hidden]; gate_up: [experts, hidden, 2, ffn]; down: [experts, ffn, hidden].
    """
    weights, dropped = probabilities(functional.linear(tokens, router), top_k, factor, sigmoid=sigmoid)
    total = torch.zeros_like(tokens)
    for expert in range(len(router)):
        weight = weights[:, expert : expert + 1]
        rows = tokens * weight if sigmoid else tokens
        gate, up = (rows @ gate_up[expert].flatten(1)).chunk(2, dim=-1)
        output = (functional.silu(gate) * up) @ down[expert]
        total = total + (output if sigmoid else output * weight)
    return total, int(dropped.sum())

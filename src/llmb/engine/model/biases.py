# SPDX-License-Identifier: Apache-2.0
"""Attention and feed-forward layers whose matrices have biases, as those of Qwen2 and gpt-oss have.

A bias is a module beside its matrix, which may be joined with others, sharded, adapted or computed in FP8 without
knowing of it. What FP8 computes in one pass over memory (see ``precision.layers``) is not for these types.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.catalogue.records import Model
from llmb.engine.model.attention import Attention, Documents, Rotary
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.local_shard import local_shard


class Bias(nn.Module):
    """Added to the outputs of a matrix.

    ``same_tokens``: the tensor-parallel ranks, which all hold it, process the same tokens.
    """

    same_tokens: bool = False

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, outputs: Tensor) -> Tensor:
        """[..., outputs] or [..., heads, head_dim], as the result."""
        bias = local_shard(self.bias, same_tokens=self.same_tokens)
        return outputs + bias.view(-1, outputs.shape[-1])


class BiasedAttention(Attention):
    """With biases of query, key and value, of the output, or of both."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__(model, layer)
        queries, keys = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
        if model.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = Bias(queries), Bias(keys), Bias(keys)
        self.o_bias = Bias(model.hidden_size) if model.attention_output_bias else None
        self.has_qkv = model.qkv_bias

    def projected(self, hidden: Tensor) -> tuple[Tensor, ...]:
        query, key, value = super().projected(hidden)
        if not self.has_qkv:
            return query, key, value
        return self.q_bias(query), self.k_bias(key), self.v_bias(value)

    def forward(self, hidden: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        output = super().forward(hidden, rotary, documents)
        biased: Tensor = output if self.o_bias is None else self.o_bias(output)
        return biased


class BiasedGatedMLP(GatedMLP):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__(hidden_size, ffn_hidden_size)
        self.gate_bias, self.up_bias, self.down_bias = Bias(ffn_hidden_size), Bias(ffn_hidden_size), Bias(hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden)
        output: Tensor = self.down_bias(self.down_proj(functional.silu(self.gate_bias(gate)) * self.up_bias(up)))
        return output


class BiasedSquaredReluMLP(SquaredReluMLP):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__(hidden_size, ffn_hidden_size)
        self.up_bias, self.down_bias = Bias(ffn_hidden_size), Bias(hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.relu(self.up_bias(self.up_proj(hidden))).square()
        output: Tensor = self.down_bias(self.down_proj(inner))
        return output

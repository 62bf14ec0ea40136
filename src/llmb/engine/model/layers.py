# SPDX-License-Identifier: Apache-2.0
"""Norms, biases and dense feed-forward layers. Biases are separate, so that matrices can be joined, adapted or cast
alone."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.engine.model.linear import Joined, Linear, local_shard


class Replicated(nn.Module):
    """A layer without matrices. same_tokens: True if tensor-parallel ranks with replicas have equal inputs."""

    same_tokens: bool = False

    def local_shard(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter, same_tokens=self.same_tokens)


class Norm(Replicated):
    """Normalization over the last dimension, computed in fp32 for any dtype of the activations."""


class RMSNorm(Norm):
    """Root-mean-square normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.local_shard(self.weight), self.eps)


class LayerNorm1P(Norm):
    """Layer normalization that stores its weights minus one, like Megatron-LM with ``--apply-layernorm-1p``."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # In bf16, 1 + weight would lose every weight below 2**-9.
        weight, bias = 1 + self.local_shard(self.weight).float(), self.local_shard(self.bias).float()
        return functional.layer_norm(hidden.float(), weight.shape, weight, bias, self.eps).to(hidden.dtype)


class Bias(Replicated):
    """Adds a bias to the outputs of a matrix: [..., outputs] or [..., heads, head_dim]."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs + self.local_shard(self.bias).view(-1, outputs.shape[-1])


def bias_if(present: bool, outputs: int) -> nn.Module:
    return Bias(outputs) if present else nn.Identity()


class GatedMLP(nn.Module):
    """A feed-forward layer with SwiGLU and three matrices (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, ffn_hidden_size)
        self.up_proj = Linear(hidden_size, ffn_hidden_size)
        self.gate_up = Joined(self, "gate_proj", "up_proj")
        self.down_proj = Linear(ffn_hidden_size, hidden_size)
        self.biased = bias
        self.gate_bias, self.up_bias = bias_if(bias, ffn_hidden_size), bias_if(bias, ffn_hidden_size)
        self.down_bias = bias_if(bias, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.end(*self.begin(hidden))

    def begin(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the products with the first matrices, the arguments of ``end``."""
        return self.gate_up(hidden)

    def end(self, gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = self.down_bias(self.down_proj(functional.silu(self.gate_bias(gate)) * self.up_bias(up)))
        return output


class SquaredReluMLP(nn.Module):
    """A feed-forward layer of two matrices with a squared ReLU between them (So et al., 2021)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, ffn_hidden_size)
        self.down_proj = Linear(ffn_hidden_size, hidden_size)
        self.biased = bias
        self.up_bias, self.down_bias = bias_if(bias, ffn_hidden_size), bias_if(bias, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.relu(self.up_bias(self.up_proj(hidden))).square()
        output: Tensor = self.down_bias(self.down_proj(inner))
        return output

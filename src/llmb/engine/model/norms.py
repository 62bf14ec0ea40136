# SPDX-License-Identifier: Apache-2.0
"""Normalization over the hidden dimension; computed in fp32 whatever the dtype of the activations."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.engine.model.local_shard import local_shard


class Norm(nn.Module):
    """A norm; ``same_tokens``: the tensor-parallel ranks, which all hold it, process the same tokens."""

    same_tokens: bool = False

    def local_shard(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter, same_tokens=self.same_tokens)


class RMSNorm(Norm):
    """Root-mean-square normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.local_shard(self.weight), self.eps)


class LayerNorm1P(Norm):
    """Layer normalization whose weight is stored minus one, so that weight decay pulls it to one."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # In bf16, 1 + weight would lose every weight below 2**-9.
        weight, bias = 1 + self.local_shard(self.weight).float(), self.local_shard(self.bias).float()
        return functional.layer_norm(hidden.float(), weight.shape, weight, bias, self.eps).to(hidden.dtype)

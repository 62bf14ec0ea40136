# SPDX-License-Identifier: Apache-2.0
"""Dense feed-forward layers."""

from torch import Tensor, nn
from torch.nn import functional

from llmb.engine.model.linear import Joined, Linear


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020), three matrices."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, ffn_hidden_size)
        self.up_proj = Linear(hidden_size, ffn_hidden_size)
        self.gate_up = Joined(self, "gate_proj", "up_proj")
        self.down_proj = Linear(ffn_hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output


class SquaredReluMLP(nn.Module):
    """Two matrices with a squared ReLU between them (So et al., 2021)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, ffn_hidden_size)
        self.down_proj = Linear(ffn_hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.relu(self.up_proj(hidden)).square())
        return output

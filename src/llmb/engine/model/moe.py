# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts as in Llama 4: the router's score scales an expert's input, and no token is dropped."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.catalogue.records import MixtureOfExperts
from llmb.engine.model.feedforward import GatedMLP
from llmb.engine.model.local import local
from llmb.engine.model.routing import Router


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows with its own matrix.

    rows: [n, k], the groups one after the other. weights: [groups, k, m]. counts: [groups], rows of each group, which
    may be zero and add up to n. Returns [n, m].
    """
    if not runs_grouped(rows, weights):
        return loop_matmul(rows, weights, counts)
    return torch._grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


def runs_grouped(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped product takes these operands: its rows have to start at multiples of 16 bytes."""
    # Its shape rule, which the compiler asks, knows bf16 only.
    dtypes = [torch.bfloat16] if torch.compiler.is_compiling() else [torch.bfloat16, torch.float32]
    aligned = all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    return aligned and rows.dtype in dtypes


def loop_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """``grouped_matmul`` as one product per group: for any operands, at the price of a wait for ``counts``."""
    groups = torch.split(rows, counts.tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def grouped_outer(rows: Tensor, gradients: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The gradient of ``weights`` in ``grouped_matmul(rows, weights, counts)``, from that of its result, [n, m]."""
    if not runs_grouped(rows, weights):
        pairs = zip(*(torch.split(part, counts.tolist()) for part in (rows, gradients)), strict=True)
        return torch.stack([group.T @ gradient for group, gradient in pairs])
    return torch._grouped_mm(rows.T, gradients, offs=counts.cumsum(0, dtype=torch.int32))


class Experts(nn.Module):
    """Gated feed-forward layers, their matrices stacked. Takes rows [n, hidden] in the order of their experts.

    Gate and up are one matrix, for one product, but keep a dimension of their own: so both can be cut by features.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden_size, 2, ffn_hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, ffn_hidden_size, hidden_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = self.multiply("gate_up_proj", rows, counts).chunk(2, dim=-1)
        return self.multiply("down_proj", functional.silu(gate) * up, counts)

    def multiply(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        return grouped_matmul(rows, self.matrices(name), counts)

    def matrices(self, name: str) -> Tensor:
        """One matrix per expert of this rank: [experts, inputs, outputs]."""
        return local(self.get_parameter(name)).flatten(2)


class MoELayer(nn.Module):
    """Routed experts beside a shared expert that every token passes."""

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.experts = Experts(hidden_size, moe.ffn_hidden_size, moe.experts)
        self.router = Router(hidden_size, moe.experts, moe.top_k)
        self.shared_expert = GatedMLP(hidden_size, moe.shared_ffn_hidden_size)
        self.expert_count = moe.experts

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.shared_expert(hidden) + self.routed(hidden.flatten(0, -2)).view_as(hidden)
        return output

    def routed(self, tokens: Tensor) -> Tensor:
        """What the chosen experts add: [n, hidden] in and out."""
        scores, chosen = self.router(tokens)
        rows = (tokens.unsqueeze(1) * scores.unsqueeze(-1)).flatten(0, 1)
        order = chosen.flatten().argsort(stable=True)
        outputs = self.run_experts(rows.index_select(0, order), self.counts(chosen))
        # Back into the tokens' order by a gather: a scatter with repeated targets would not be reproducible.
        return torch.unflatten(outputs.index_select(0, order.argsort()), 0, chosen.shape).sum(1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Not compiled: the shapes depend on the tokens, and experts gather their parameters apart from their block."""
        outputs: Tensor = self.experts(rows, counts)
        return outputs

    def counts(self, chosen: Tensor) -> Tensor:
        """Rows for each expert. Unlike ``bincount``, its shape does not depend on the data."""
        experts = torch.arange(self.expert_count, device=chosen.device)
        return (chosen.reshape(-1, 1) == experts).sum(0)

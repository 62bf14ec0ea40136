# SPDX-License-Identifier: Apache-2.0
"""Embedding and loss with the vocabulary cut over the ranks of a tensor-parallel group."""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from llmb.engine.model.local import local
from llmb.engine.model.loss import IGNORED, CrossEntropy
from llmb.engine.parallel.boundary import Boundary
from llmb.engine.parallel.collectives import Group, all_reduce


class VocabParallelEmbedding(nn.Embedding):
    """Takes all tokens, [batch, seq], and returns the hidden states that this rank has of them between layers."""

    def __init__(self, whole: nn.Embedding, boundary: Boundary) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, _weight=whole.weight)
        self.boundary = boundary

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        rows, held = held_rows(tokens, weight.shape[0], self.boundary.group)
        hidden = functional.embedding(rows, weight) * held.unsqueeze(-1)
        return self.boundary.leave(hidden)


def held_rows(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Where tokens are in this rank's ``size`` rows of the vocabulary (any row where they are not), and whether."""
    rows = tokens - group.rank * size
    held = (rows >= 0) & (rows < size)
    return rows.clamp(0, size - 1), held


class VocabParallelCrossEntropy(CrossEntropy):
    """Takes the logits of this rank's part of the vocabulary and all labels; every rank returns the same."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = _VocabParallelTotal.apply(logits, labels, self.group)  # type: ignore[no-untyped-call]
        return total


class _Context(FunctionCtx):
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, ...]


class _VocabParallelTotal(torch.autograd.Function):
    """-log(softmax(logits)[label]), summed.

    With m the largest logit it is log(sum(exp(logits - m))) - (logits[label] - m); every sum is one over the ranks.
    """

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        largest = all_reduce(logits.amax(-1).float(), "max", group)
        shifted = logits.float() - largest.unsqueeze(-1)
        rows, held = held_rows(labels, logits.shape[-1], group)
        label = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * held
        exponentials = shifted.exp_()
        label, sums = all_reduce(torch.stack((label, exponentials.sum(-1))), "sum", group)
        counts = labels != IGNORED
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), rows, held, counts)
        ctx.dtype = logits.dtype
        total: Tensor = ((sums.log() - label) * counts).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, rows, held, counts = ctx.saved_tensors
        # In place: a copy would take as much memory as all logits.
        probabilities.scatter_add_(-1, rows.unsqueeze(-1), -held.to(probabilities.dtype).unsqueeze(-1))
        return probabilities.mul_((gradient * counts).unsqueeze(-1)).to(ctx.dtype), None, None

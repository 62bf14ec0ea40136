# SPDX-License-Identifier: Apache-2.0
"""Embedding and loss with the vocabulary sharded over the ranks of a tensor-parallel group."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.engine.model.local_shard import local_shard
from llmb.engine.model.loss import Vocabulary
from llmb.engine.parallel.boundary import Boundary
from llmb.engine.parallel.collectives import Group, all_gather


class VocabParallelEmbedding(nn.Embedding):
    """Takes all tokens, [batch, seq], and returns this rank's hidden states, sharded as between layers."""

    def __init__(self, full: nn.Embedding, boundary: Boundary) -> None:
        super().__init__(full.num_embeddings, full.embedding_dim, _weight=full.weight)
        self.weight.requires_grad_(full.weight.requires_grad)
        self.boundary = boundary

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        rows, held = held_rows(tokens, weight.shape[0], self.boundary.group)
        hidden = functional.embedding(rows, weight) * held.unsqueeze(-1)
        return self.boundary.leave(hidden)


def held_rows(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """The rows of tokens in this rank's ``size`` rows of the vocabulary (any row if not held), and which are held."""
    rows = tokens - group.rank * size
    held = (rows >= 0) & (rows < size)
    return rows.clamp(0, size - 1), held


class VocabularyShard(Vocabulary):
    """This rank's shard of ``size`` columns; all shards have the same size."""

    def __init__(self, group: Group, size: int) -> None:
        self.group = group
        self.first = group.rank * size // group.size

    def combine(self, log_sums: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """One collective. The label is in one rank's shard; the others have 0 for its logit."""
        gathered = all_gather(torch.stack((log_sums, label)).unsqueeze(0), 0, self.group)
        return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)

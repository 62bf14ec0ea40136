# SPDX-License-Identifier: Apache-2.0
"""The boundary at which hidden states enter and leave layers that tensor parallelism shards."""

from typing import NamedTuple

from torch import Tensor

from llmb.engine.parallel.collectives import Group, all_gather, gradient_sum, rank_sum, reduce_scatter

SEQUENCE = 1
"""The dimension of hidden states, [batch, seq, hidden], that sequence parallelism shards."""


class Boundary(NamedTuple):
    """Between such layers a rank holds its shard of the sequence, or the full sequence without sequence parallelism.

    With: Korthikanti et al., 2022, section 4.2. Without: Shoeybi et al., 2019, section 3.
    """

    group: Group
    sequence_parallel: bool

    def enter(self, hidden: Tensor) -> Tensor:
        """Gathers the full sequence on every rank."""
        if self.sequence_parallel:
            return all_gather(hidden, SEQUENCE, self.group)
        return gradient_sum(hidden, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """Reduces the partial sums of all ranks, each of the full sequence."""
        if self.sequence_parallel:
            return reduce_scatter(hidden, SEQUENCE, self.group)
        return rank_sum(hidden, self.group)

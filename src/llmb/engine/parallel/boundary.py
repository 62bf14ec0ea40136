# SPDX-License-Identifier: Apache-2.0
"""Where hidden states enter and leave the layers that tensor parallelism cuts."""

from typing import NamedTuple

from torch import Tensor

from llmb.engine.parallel.collectives import Group, all_gather, gradient_sum, rank_sum, reduce_scatter

SEQUENCE = 1
"""The dimension of hidden states, [batch, seq, hidden], that sequence parallelism cuts."""


class Boundary(NamedTuple):
    """Between such layers a rank has its part of the sequence, or all of it without sequence parallelism.

    With: Korthikanti et al., 2022, section 4.2. Without: Shoeybi et al., 2019, section 3.
    """

    group: Group
    sequence_parallel: bool

    def enter(self, hidden: Tensor) -> Tensor:
        """To the whole sequence on every rank."""
        if self.sequence_parallel:
            return all_gather(hidden, SEQUENCE, self.group)
        return gradient_sum(hidden, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """From one summand of the whole sequence on every rank."""
        if self.sequence_parallel:
            return reduce_scatter(hidden, SEQUENCE, self.group)
        return rank_sum(hidden, self.group)

# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a step, micro-batch by micro-batch."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmb.catalogue.records import Layout
from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.data_parallel import accumulate


class Passes(Protocol):
    """Runs the passes of a step over this rank's share of the model."""

    @property
    def stages(self) -> Sequence[Decoder]: ...

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor | None:
        """Adds the gradients of the mean loss; that loss of this rank, 0-d fp64, or null where it has none.

        count: labels that count in one micro-batch on one rank, on average over the step's micro-batches and ranks. A
        sum divided by it is, again on average, the mean over all labels that count.
        """


class Accumulation:
    """One micro-batch after the other through the whole model; ``keep_whole`` keeps gathered parameters in between."""

    def __init__(self, model: Decoder, layout: Layout, positions: Tensor, *, keep_whole: bool) -> None:
        self.stages = [model]
        self.keep_whole = keep_whole
        self.layout = layout
        self.positions = positions

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor:
        (model,), ga = self.stages, self.layout.ga
        # fp64, because the mean of a few fp32 losses would depend on their order in its last digit.
        total = torch.zeros((), device=self.positions.device, dtype=torch.float64)
        for index, (tokens, labels, starts) in enumerate(batches):
            accumulate(model, last=index == ga - 1, keep_whole=self.keep_whole)
            # Divided here, not after: gradients in bf16 would be rounded once more.
            loss = model(tokens[:, self.positions], labels[:, self.positions], self.positions, starts, count * ga)
            loss.backward()
            total += loss.detach()
        return total

# SPDX-License-Identifier: Apache-2.0
"""The training loss."""

from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Label of a position that does not count."""


class CrossEntropy(nn.Module):
    """Mean over the positions that count, from fp32 logits: [batch, seq, vocab] and [batch, seq] to a 0-d tensor."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.total(logits, labels) / self.count(labels)

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum instead of the mean."""
        rows = logits.flatten(0, 1).float()
        return functional.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def count(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED).sum()

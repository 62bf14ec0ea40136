# SPDX-License-Identifier: Apache-2.0
"""The training loss."""

from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Label of a position that does not count."""


class CrossEntropy(nn.Module):
    """Mean over the positions that count, from fp32 logits: [batch, seq, vocab] and [batch, seq] to a 0-d tensor."""

    def forward(self, logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
        """With ``count``, divides by that instead of the number of labels that count here."""
        return self.total(logits, labels) / ((labels != IGNORED).sum() if count is None else count)

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum instead of the mean."""
        rows = logits.flatten(0, 1).float()
        return functional.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED, reduction="sum")

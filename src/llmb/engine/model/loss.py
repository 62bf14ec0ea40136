# SPDX-License-Identifier: Apache-2.0
"""The training loss."""

from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Label of a position that does not count."""


class CrossEntropy(nn.Module):
    """Mean over the positions that count, from fp32 logits: [batch, seq, vocab] and [batch, seq] to a 0-d tensor."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

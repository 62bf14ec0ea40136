# SPDX-License-Identifier: Apache-2.0
"""The training loss: head and cross entropy fused, so that the full logits never exist in memory.

Logits are computed, used and freed in chunks. The forward pass computes some rows at a time, and with them the gradient
of these rows' hidden states. The gradient of the weight is a sum over rows; accumulating it over chunks in fp32 would
take 4 x vocab x hidden bytes in addition to the gradient itself: hidden / rows times the size of all logits in fp32,
which is the same size for Llama 3.1 8b with 4,096 rows and four times that for 405b. The backward pass recomputes the
logits instead, some columns at a time, so each chunk yields its rows of that gradient at once. That is a fourth product
of this size in addition to three. If all logits are one chunk, the gradient of the logits is kept, and the fourth
product is not needed.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.model.linear import Linear
from llmb.engine.model.local_shard import local_shard
from llmb.engine.model.softmax import SMALLEST_BYTES, Softmax, chunk_bytes, chunk_length, chunk_slices, slice_bytes
from llmb.engine.typed_autograd import apply, save_for_backward

IGNORED = -100
"""Label of an ignored position."""


class Vocabulary:
    """The columns of the logits on this rank: here all of them."""

    first = 0

    def combine(self, log_sums: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """``statistics`` over all columns from those of this rank's columns."""
        return log_sums, label


class Head(Linear):
    """Logits of hidden states; with labels, the loss. The attributes select the computation.

    smallest_bytes: logits of at most this size are one chunk.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.vocabulary = Vocabulary()
        self.softmax = Softmax()
        self.smallest_bytes: float = SMALLEST_BYTES

    def forward(self, hidden: Tensor, labels: Tensor | None = None, count: Tensor | float | None = None) -> Tensor:
        """[batch, seq, hidden] to [batch, seq, vocab]; with labels, [batch, seq], to the loss, 0-d fp32.

        The loss is the sum over counted positions, divided by ``count`` or by their number.
        """
        if labels is None:
            return super().forward(hidden)
        weight = local_shard(self.weight)
        shares = label_shares(labels, count).flatten()
        places = labels.flatten() - self.vocabulary.first
        loss: Tensor = apply(
            _Loss,
            hidden.flatten(0, 1),
            weight,
            places,
            shares,
            self,
        )
        return loss


def label_shares(labels: Tensor, count: Tensor | float | None) -> Tensor:
    """Factor of each label's cross entropy, in fp32: 1 / ``count``, or 0 for an ignored one."""
    counts = labels != IGNORED
    return counts.float() / (counts.sum() if count is None else count)


class _LossContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    head: Head


class _Loss(torch.autograd.Function):
    """The loss of hidden [rows, hidden], weight [vocab, hidden], and places and shares of labels, [rows]."""

    @staticmethod
    def forward(
        ctx: _LossContext, hidden: Tensor, weight: Tensor, places: Tensor, shares: Tensor, head: Head
    ) -> Tensor:
        rows, columns = len(hidden), len(weight)
        length = chunk_length(rows, columns, hidden.itemsize, chunk_bytes(rows, columns, head.smallest_bytes))
        sliced = chunk_length(length, columns, 4, slice_bytes(rows, columns))
        gradient = torch.empty_like(hidden) if any(ctx.needs_input_grad) else None
        log_sums, label = (torch.empty_like(shares) for _ in range(2))
        own_places = within(places, columns)
        kept: Tensor | None = None
        makes_weight = ctx.needs_input_grad[1]
        for part in chunk_slices(rows, length):
            logits = torch.mm(hidden[part], weight.T)
            own = head.softmax.statistics(logits, own_places[part], sliced)
            log_sums[part], label[part] = head.vocabulary.combine(*own)
            if gradient is not None:
                head.softmax.to_gradient(logits, own_places[part], log_sums[part], shares[part], sliced)
                torch.mm(logits, weight, out=gradient[part])
            kept = logits if length == rows and makes_weight else None
            del logits  # before the next chunk needs the memory
        save_for_backward(ctx, hidden, weight, places, shares, log_sums, gradient, kept)
        ctx.head = head
        # In fp64, because the sum of a few thousand fp32 terms would depend on their order in its last digits.
        return ((log_sums - label).double() * shares).sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, places, shares, log_sums, of_hidden, kept = ctx.saved_tensors
        scaled = shares * gradient
        of_weight: Tensor | None = None
        if kept is not None:
            of_weight = _from_kept(kept, hidden, gradient)
        elif ctx.needs_input_grad[1]:
            of_weight = _from_columns(ctx.head, hidden, places, log_sums, scaled, weight)
        return of_hidden.mul_(gradient), of_weight, None, None, None


def within(places: Tensor, columns: int) -> Tensor:
    """-1 for places outside these columns."""
    return places.masked_fill((places < 0) | (places >= columns), -1)


@torch.no_grad()
def _from_kept(kept: Tensor, hidden: Tensor, gradient: Tensor) -> Tensor:
    """The weight's gradient from the logits', which is that for a ``gradient`` of 1."""
    return torch.mm(kept.T, hidden).mul_(gradient)


@torch.no_grad()
def _from_columns(
    head: Head, hidden: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor, weight: Tensor
) -> Tensor:
    """The weight's gradient from recomputed logits, some columns at a time."""
    rows, columns = len(hidden), len(weight)
    length = chunk_length(columns, rows, hidden.itemsize, chunk_bytes(rows, columns, head.smallest_bytes))
    sliced = chunk_length(rows, length, 4, slice_bytes(rows, columns))
    result = torch.empty_like(weight)
    for part in chunk_slices(columns, length):
        logits = torch.mm(hidden, weight[part].T)
        own_places = within(places - part.start, len(weight[part]))
        head.softmax.to_gradient(logits, own_places, log_sums, shares, sliced)
        torch.mm(logits.T, hidden, out=result[part])
        del logits  # before the next chunk needs the memory
    return result

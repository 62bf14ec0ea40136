# SPDX-License-Identifier: Apache-2.0
"""The training loss: head and cross entropy in one, so that logits are never whole.

Logits are computed, used and dropped in pieces. The forward pass takes them some rows at a time and makes the gradient
of these rows' hidden states with them. The gradient of the weight is a sum over rows; to add it up piece by piece, in
fp32, would take 4 x vocab x hidden bytes beside the gradient itself: hidden / rows of what all logits take in fp32,
which is as much for Llama 3.1 8b with 4,096 rows and four times as much for 405b. The backward pass computes the logits
again instead, some columns at a time: each piece then gives its rows of that gradient at once. That is a fourth product
of this size beside three. Where all logits are one piece, it is kept, as gradient of the logits, and the fourth product
is left out.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.model.chunking import SMALLEST_BYTES, chunk_bytes, chunk_length, chunk_slices, slice_bytes
from llmb.engine.model.local_shard import Linear, local_shard
from llmb.engine.model.softmax import Softmax

IGNORED = -100
"""Label of a position that does not count."""
Later = Callable[[Callable[[Tensor], Tensor]], None]
"""Takes what makes a weight's gradient from the weight, to be called when there is time."""


class Vocabulary:
    """The columns of the logits that this rank has: here all of them."""

    first = 0

    def combine(self, log_sums: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """``statistics`` of all columns from those of this rank's."""
        return log_sums, label


class Head(Linear):
    """Logits of hidden states; with labels, the loss. The attributes say how it is computed.

    smallest_bytes: logits that take no more than this are one piece.
    later: gets the weight's gradient to make, where the backward pass shall not make it.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.vocabulary = Vocabulary()
        self.softmax = Softmax()
        self.smallest_bytes: float = SMALLEST_BYTES
        self.later: Later | None = None

    def forward(self, hidden: Tensor, labels: Tensor | None = None, count: Tensor | float | None = None) -> Tensor:
        """[batch, seq, hidden] to [batch, seq, vocab]; with labels, [batch, seq], to the loss, 0-d fp32.

        That is the sum over the positions that count, divided by ``count`` or else by their number.
        """
        if labels is None:
            return super().forward(hidden)
        weight = local_shard(self.weight)
        shares = label_shares(labels, count).flatten()
        places = labels.flatten() - self.vocabulary.first
        loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight.detach() if self.later else weight, places, shares, self
        )
        return loss


def label_shares(labels: Tensor, count: Tensor | float | None) -> Tensor:
    """What each label's cross entropy is multiplied with, in fp32: 1 / ``count``, or 0 where it does not count."""
    counts = labels != IGNORED
    return counts.float() / (counts.sum() if count is None else count)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    head: Head


class _Loss(torch.autograd.Function):
    """Of hidden [rows, hidden], weight [vocab, hidden], and places and shares of labels, [rows]."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, places: Tensor, shares: Tensor, head: Head) -> Tensor:
        rows, columns = len(hidden), len(weight)
        length = chunk_length(rows, columns, hidden.itemsize, chunk_bytes(rows, columns, head.smallest_bytes))
        sliced = chunk_length(length, columns, 4, slice_bytes(rows, columns))
        gradient = torch.empty_like(hidden) if any(ctx.needs_input_grad) else None
        log_sums, label = (torch.empty_like(shares) for _ in range(2))
        own_places = within(places, columns)
        kept: Tensor | None = None
        for part in chunk_slices(rows, length):
            logits = torch.mm(hidden[part], weight.T)
            own = head.softmax.statistics(logits, own_places[part], sliced)
            log_sums[part], label[part] = head.vocabulary.combine(*own)
            if gradient is not None:
                head.softmax.to_gradient(logits, own_places[part], log_sums[part], shares[part], sliced)
                torch.mm(logits, weight, out=gradient[part])
            kept = logits if length == rows else None
            del logits  # before the next piece needs the memory
        ctx.save_for_backward(hidden, weight, places, shares, log_sums, gradient, kept)  # type: ignore[arg-type]
        ctx.head = head
        # In fp64, because the sum of a few thousand fp32 terms would depend on their order in its last digits.
        return ((log_sums - label).double() * shares).sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, places, shares, log_sums, of_hidden, kept = ctx.saved_tensors
        scaled = shares * gradient
        if kept is not None:
            make = partial(_from_kept, kept, hidden, gradient)
        else:
            make = partial(_from_columns, ctx.head, hidden, places, log_sums, scaled)
        of_weight = make(weight) if ctx.needs_input_grad[1] else None
        if ctx.head.later:
            ctx.head.later(make)
        return of_hidden.mul_(gradient), of_weight, None, None, None


def within(places: Tensor, columns: int) -> Tensor:
    """-1 for places that are not in these columns."""
    return places.masked_fill((places < 0) | (places >= columns), -1)


@torch.no_grad()
def _from_kept(kept: Tensor, hidden: Tensor, gradient: Tensor, _weight: Tensor) -> Tensor:
    """The weight's gradient from the logits', which is that for a ``gradient`` of 1."""
    return torch.mm(kept.T, hidden).mul_(gradient)


@torch.no_grad()
def _from_columns(
    head: Head, hidden: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor, weight: Tensor
) -> Tensor:
    """The weight's gradient from logits that are computed again, some columns at a time."""
    rows, columns = len(hidden), len(weight)
    length = chunk_length(columns, rows, hidden.itemsize, chunk_bytes(rows, columns, head.smallest_bytes))
    sliced = chunk_length(rows, length, 4, slice_bytes(rows, columns))
    result = torch.empty_like(weight)
    for part in chunk_slices(columns, length):
        logits = torch.mm(hidden, weight[part].T)
        own_places = within(places - part.start, len(weight[part]))
        head.softmax.to_gradient(logits, own_places, log_sums, shares, sliced)
        torch.mm(logits.T, hidden, out=result[part])
        del logits  # before the next piece needs the memory
    return result

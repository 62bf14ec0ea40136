# SPDX-License-Identifier: Apache-2.0
"""The training loss: head and cross entropy fused in chunks, so that the full logits need not be in memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from llmb.engine.collectives import Context
from llmb.engine.model.linear import Linear, local_shard

LARGEST_CHUNK = 1 / 16
"""Largest chunk, as a fraction of the size of all logits in fp32."""
LARGEST_SLICE = 1 / 64
"""Largest part of a chunk in fp32 at a time, relative to all logits in fp32."""
SMALLEST_BYTES = 2**20
"""Logits of at most this size are not chunked."""
ALIGNED = 64
"""Chunk lengths are multiples of this if possible, because matrix units are then more efficient."""
IGNORED = -100
"""Label of an ignored position."""


def chunk_bytes(rows: int, columns: int, at_least: float = SMALLEST_BYTES) -> float:
    """Return the maximum bytes of a chunk of [rows, columns] logits."""
    return max(LARGEST_CHUNK * 4 * rows * columns, at_least)


def slice_bytes(rows: int, columns: int) -> float:
    """Return the maximum bytes of the values of a chunk that are computed in fp32 at a time."""
    return max(LARGEST_SLICE * 4 * rows * columns, SMALLEST_BYTES)


def chunk_length(length: int, width: int, itemsize: int, most_bytes: float) -> int:
    """Return the number of rows or columns of ``width`` values per chunk of at most ``most_bytes``; at least one."""
    longest = max(1, int(min(length, most_bytes / (width * itemsize))))
    if longest >= length:
        return length
    if longest < ALIGNED:
        return longest
    longest -= longest % ALIGNED
    even = -(-length // -(-length // longest))
    return min(longest, -(-even // ALIGNED) * ALIGNED)


def chunk_slices(length: int, chunk: int) -> Iterator[slice]:
    """Yield the slices of consecutive chunks; the last may be shorter."""
    for first in range(0, length, chunk):
        yield slice(first, min(first + chunk, length))


def statistics(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(sum(exp(logits))) and the label's logit, [rows] fp32 each; the logit is 0 where ``places`` is -1."""
    largest = logits.amax(-1, keepdim=True).float()
    log_sums = (logits - largest).exp_().sum(-1).log_() + largest.squeeze(-1)
    label = logits.gather(-1, places.clamp(min=0).unsqueeze(-1)).squeeze(-1).float()
    return log_sums, label.masked_fill(places < 0, 0.0)


def to_gradient(logits: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor) -> None:
    """Overwrite the logits with share * (softmax - one-hot of the label). ``log_sums``: over the columns of all
    ranks."""
    gradient = (logits - log_sums.unsqueeze(-1)).exp_()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient.add_(columns == places.unsqueeze(-1), alpha=-1).mul_(shares.unsqueeze(-1))
    logits.copy_(gradient)


def to_gradient_one_by_one(logits: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor) -> None:
    """Compute the same gradient as ``to_gradient``, bit for bit, in less time on a CPU."""
    into = logits if logits.dtype == log_sums.dtype else None
    gradient = torch.sub(logits, log_sums.unsqueeze(-1), out=into).exp_()
    of_label = (places < 0).float() - 1
    gradient.scatter_add_(-1, places.clamp(min=0).unsqueeze(-1), of_label.unsqueeze(-1)).mul_(shares.unsqueeze(-1))
    if into is None:
        logits.copy_(gradient)


class Softmax:
    """Applies ``statistics`` and ``to_gradient`` to slices of rows or, with a compiler ``backend``, to all rows."""

    def __init__(self, backend: str | Callable[..., Any] | None = None) -> None:
        self.sliced = backend is None
        self._statistics, self._to_gradient = statistics, to_gradient_one_by_one
        if backend is not None:
            self._statistics = torch.compile(statistics, dynamic=False, backend=backend)
            self._to_gradient = torch.compile(to_gradient, dynamic=False, backend=backend)

    def statistics(self, logits: Tensor, places: Tensor, slice_rows: int) -> tuple[Tensor, Tensor]:
        parts = [self._statistics(logits[rows], places[rows]) for rows in self._slices(logits, slice_rows)]
        log_sums, label = (torch.cat(each) for each in zip(*parts, strict=True))
        return log_sums, label

    def to_gradient(self, logits: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor, slice_rows: int) -> None:
        for rows in self._slices(logits, slice_rows):
            self._to_gradient(logits[rows], places[rows], log_sums[rows], shares[rows])

    def _slices(self, logits: Tensor, slice_rows: int) -> list[slice]:
        return list(chunk_slices(len(logits), slice_rows if self.sliced else len(logits)))


class Vocabulary:
    """The columns of the logits on this rank: here all of them."""

    first = 0

    def combine(self, log_sums: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``statistics`` of all columns, given the statistics of this rank's columns."""
        return log_sums, label


class Head(Linear):
    """The output layer: returns logits of hidden states or, with labels, the loss."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.vocabulary = Vocabulary()
        self.softmax = Softmax()
        self.smallest_bytes: float = SMALLEST_BYTES

    def forward(self, hidden: Tensor, labels: Tensor | None = None, count: Tensor | float | None = None) -> Tensor:
        """Return logits, [batch, seq, vocab] or, with labels, the summed loss divided by ``count``: 0-d fp32."""
        if labels is None:
            return super().forward(hidden)
        weight = local_shard(self.weight)
        # The factor of each label's cross entropy, 0 for an ignored one.
        counts = labels != IGNORED
        shares = (counts.float() / (counts.sum() if count is None else count)).flatten()
        small = hidden.shape[:-1].numel() * len(weight) * hidden.itemsize <= min(self.smallest_bytes, SMALLEST_BYTES)
        if small and hidden.is_cpu and type(self.vocabulary) is Vocabulary:
            # torch's own is faster, and its memory does not matter.
            logits = self.multiply(hidden).flatten(0, 1).float()
            each = functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
            return _total(each, shares)
        places = labels.flatten() - self.vocabulary.first
        loss: Tensor = _Loss.apply(hidden.flatten(0, 1), weight, places, shares, self)
        return loss


class _LossContext(Context):
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
        ctx.save_for_backward(hidden, weight, places, shares, log_sums, gradient, kept)
        ctx.head = head
        return _total(log_sums - label, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, places, shares, log_sums, of_hidden, kept = ctx.saved_tensors
        scaled = shares * gradient
        of_weight: Tensor | None = None
        if kept is not None:
            # The gradient of the logits is that for a ``gradient`` of 1.
            of_weight = torch.mm(kept.T, hidden).mul_(gradient)
        elif ctx.needs_input_grad[1]:
            of_weight = _from_columns(ctx.head, hidden, places, log_sums, scaled, weight)
        return of_hidden.mul_(gradient), of_weight, None, None, None


def _total(losses: Tensor, shares: Tensor) -> Tensor:
    """Sum in fp64: in fp32, the last digits would depend on the order."""
    return (losses.double() * shares).sum().float()


def within(places: Tensor, columns: int) -> Tensor:
    """Return the places, with -1 for places outside the first ``columns`` columns."""
    return places.masked_fill((places < 0) | (places >= columns), -1)


@torch.no_grad()
def _from_columns(
    head: Head, hidden: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor, weight: Tensor
) -> Tensor:
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

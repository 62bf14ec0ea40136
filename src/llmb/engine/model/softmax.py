# SPDX-License-Identifier: Apache-2.0
"""Computation on a chunk of logits between the matrix products of the loss, in fp32 for any dtype of the logits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

LARGEST_CHUNK = 1 / 16
"""Largest chunk, as a fraction of the size of all logits in fp32."""
LARGEST_SLICE = 1 / 64
"""Likewise: largest part of a chunk that is in fp32 at a time."""
SMALLEST_BYTES = 2**20
"""Smaller logits are not chunked."""
ALIGNED = 64
"""Chunk lengths are multiples of it if possible, because matrix units prefer them."""


def chunk_bytes(rows: int, columns: int, at_least: float = SMALLEST_BYTES) -> float:
    """Maximum bytes of a chunk of [rows, columns] logits."""
    return max(LARGEST_CHUNK * 4 * rows * columns, at_least)


def slice_bytes(rows: int, columns: int) -> float:
    """Maximum bytes of the values of a chunk that are computed in fp32 at a time."""
    return max(LARGEST_SLICE * 4 * rows * columns, SMALLEST_BYTES)


def chunk_length(length: int, width: int, itemsize: int, most_bytes: float) -> int:
    """Length of a chunk along ``length`` with at most ``most_bytes``, with ``width`` values for each element.

    Chunks are as even as alignment permits, and at least 1 long, whatever its size.
    """
    longest = max(1, int(min(length, most_bytes / (width * itemsize))))
    if longest >= length:
        return length
    if longest < ALIGNED:
        return longest
    longest -= longest % ALIGNED
    even = -(-length // -(-length // longest))
    return min(longest, -(-even // ALIGNED) * ALIGNED)


def chunk_slices(length: int, chunk: int) -> Iterator[slice]:
    """Consecutive chunks; the last may be shorter."""
    for first in range(0, length, chunk):
        yield slice(first, min(first + chunk, length))


def statistics(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """For [rows, columns] logits: log(sum(exp(logits))) and the label's logit, [rows] fp32 each.

    ``places`` are the labels' columns, -1 if a label is in another chunk; its logit is then 0.
    """
    largest = logits.amax(-1, keepdim=True).float()
    log_sums = (logits - largest).exp_().sum(-1).log_() + largest.squeeze(-1)
    label = logits.gather(-1, places.clamp(min=0).unsqueeze(-1)).squeeze(-1).float()
    return log_sums, label.masked_fill(places < 0, 0.0)


def to_gradient(logits: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor) -> None:
    """Overwrites the logits with the gradient of ``sum(shares * (log_sums - label))``.

    It is share * (softmax - one-hot of the label); ``log_sums`` are those of all columns.
    """
    gradient = (logits - log_sums.unsqueeze(-1)).exp_()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient.add_(columns == places.unsqueeze(-1), alpha=-1).mul_(shares.unsqueeze(-1))
    logits.copy_(gradient)


def to_gradient_one_by_one(logits: Tensor, places: Tensor, log_sums: Tensor, shares: Tensor) -> None:
    """``to_gradient`` bit by bit, for operations that each pass over memory: an eighth of the time on a CPU."""
    into = logits if logits.dtype == log_sums.dtype else None
    gradient = torch.sub(logits, log_sums.unsqueeze(-1), out=into).exp_()
    of_label = (places < 0).float() - 1
    gradient.scatter_add_(-1, places.clamp(min=0).unsqueeze(-1), of_label.unsqueeze(-1)).mul_(shares.unsqueeze(-1))
    if into is None:
        logits.copy_(gradient)


class Softmax:
    """Both functions process some rows at a time, because their intermediate values are in memory.

    Compiled, they process all rows at once: intermediate values then stay in registers.
    """

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

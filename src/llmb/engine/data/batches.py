# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: what they hold, which samples they are made of, and their copy to the device."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from llmb.catalogue.records import Layout
from llmb.engine.model.documents import DocumentSegments

Parts = TypeVar("Parts", bound=tuple[Any, ...])


class MicroBatch(NamedTuple):
    """[MBS, seq] each, of complete sequences.

    starts: position in its sequence at which the document of each token begins; None if a sequence is one document.
    taken: places of each sequence that documents take; the others, at its end, are padding. None if there is none.
    segments: the documents for variable-length attention, of this rank's part of the sequences; None for masks.
    """

    tokens: Tensor
    labels: Tensor
    starts: Tensor | None
    taken: tuple[int, ...] | None = None
    segments: DocumentSegments | None = None


class TrainingData(Protocol):
    """Samples by number. A sample depends on its number and the seed only, so every layout trains on the same data."""

    def longest_document(self) -> int:
        """The most tokens that a document of any sample can have, or padding."""

    def micro_batch(self, numbers: range) -> MicroBatch:
        """The samples with these numbers, on the host. The last token of a document has no label."""


def rank_samples(layout: Layout, first_sample: int, dp_rank: int) -> Iterator[range]:
    """The numbers of the samples in every micro-batch of a rank.

    All ranks together train on the GBS samples from ``first_sample`` on, whatever the layout.
    """
    for index in range(layout.ga):
        first = first_sample + (index * layout.dp + dp_rank) * layout.mbs
        yield range(first, first + layout.mbs)


def on_device(batches: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Passes micro-batches on, moved to ``device``. Each is copied to a GPU before the one before it is returned.

    The copy has its own stream, so that it does not wait for work that is queued on the GPU.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = copy_stream(device)
    ahead = None
    for batch in batches:
        coming = _copied(batch, device, stream)
        if ahead is not None:
            yield _ready(ahead, stream)
        ahead = coming
    if ahead is not None:
        yield _ready(ahead, stream)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the whole run: torch has 32, which others use, too, and memory that a stream used is kept for it."""
    return torch.cuda.Stream(device)


def moved(parts: Parts, device: torch.device) -> Parts:
    """Copies all tensors of a tuple to ``device``. Does not wait for a GPU."""

    def move(part: object) -> object:
        if not isinstance(part, Tensor):
            return part
        return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)

    copies: Parts = tree_map(move, parts)
    return copies


def _copied(batch: MicroBatch, device: torch.device, stream: torch.cuda.Stream) -> MicroBatch:
    with torch.cuda.stream(stream):
        return moved(batch, device)


def _ready(batch: MicroBatch, stream: torch.cuda.Stream) -> MicroBatch:
    """Makes the current stream wait for the copy, and the allocator keep the memory while the stream uses it."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for part in tree_leaves(batch):
        if isinstance(part, Tensor):
            part.record_stream(current)
    return batch

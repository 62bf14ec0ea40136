# SPDX-License-Identifier: Apache-2.0
"""Copies micro-batches to the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """[MBS, seq] each, of complete sequences.

    starts: position in its sequence at which the document of each token begins; None if a sequence is one document.
    """

    tokens: Tensor
    labels: Tensor
    starts: Tensor | None


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """The same micro-batches on ``device``. Each is copied to a GPU before the one before it is returned.

    The copy has its own stream, so that it does not wait for work that is queued on the GPU.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead = None
    for batch in batches:
        coming = _copied(batch, device, stream)
        if ahead is not None:
            yield _ready(ahead, stream)
        ahead = coming
    if ahead is not None:
        yield _ready(ahead, stream)


def _copied(batch: MicroBatch, device: torch.device, stream: torch.cuda.Stream) -> MicroBatch:
    with torch.cuda.stream(stream):
        tokens, labels, starts = (
            None if part is None else part.pin_memory().to(device, non_blocking=True) for part in batch
        )
    assert tokens is not None
    assert labels is not None
    return MicroBatch(tokens, labels, starts)


def _ready(batch: MicroBatch, stream: torch.cuda.Stream) -> MicroBatch:
    """Makes the current stream wait for the copy, and the allocator keep the memory while the stream uses it."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for part in batch:
        if part is not None:
            part.record_stream(current)
    return batch

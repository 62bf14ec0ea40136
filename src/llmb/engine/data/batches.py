# SPDX-License-Identifier: Apache-2.0
"""Micro-batches on their way to the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """[MBS, seq] each, of whole sequences.

    starts: where in its sequence the document of each token begins; null where a sequence is one text.
    """

    tokens: Tensor
    labels: Tensor
    starts: Tensor | None


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """The same, on ``device``. Each is made and copied to a GPU before the one before it is given out.

    The copy has a stream of its own, so that it does not wait for what the GPU has to compute first.
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
    """Makes the current stream wait for the copy, and the allocator keep the memory for as long as it is used there."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for part in batch:
        if part is not None:
            part.record_stream(current)
    return batch

# SPDX-License-Identifier: Apache-2.0
"""The data that shows whether a collective is right: what each rank must receive, and how errors are counted."""

import pytest
import torch

from llmb.engine.microbenchmarks import collectives as worker
from llmb.engine.microbenchmarks.collectives import fill, wrong
from llmb.microbenchmarks.collectives import COLLECTIVES, expected_data, extent, sent_data

RANKS = 3


def received(collective, sent, rank):
    """What a collective is, written out."""
    part = len(sent[0]) // RANKS
    match collective:
        case "all_reduce":
            return sum(sent)
        case "all_gather":
            return torch.cat(sent)
        case "reduce_scatter":
            return sum(sent)[rank * part : (rank + 1) * part]
        case "alltoall":
            return torch.cat([one[rank * part : (rank + 1) * part] for one in sent])
        case "sendrecv":
            return sent[(rank - 1) % RANKS]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch) -> None:
    """So that a buffer has several."""
    monkeypatch.setattr(worker, "BLOCK", 10)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_expected_is_what_the_collective_gives(collective) -> None:
    size = extent(collective, 480, RANKS)
    sent = [torch.zeros(size.sent) for _ in range(RANKS)]
    for rank, buffer in enumerate(sent):
        fill(buffer, sent_data(size, rank))
    for rank in range(RANKS):
        found = received(collective, sent, rank)
        assert len(found) == size.received
        pieces = expected_data(collective, size, rank, RANKS)
        assert sum(piece.count for piece in pieces) == size.received
        assert sum(wrong(found, piece) for piece in pieces) == 0
        spoiled = found.clone()
        spoiled[[0, 7, -1]] += 1
        assert sum(wrong(spoiled, piece) for piece in pieces) == 3
        # Data of another rank, a rank that is missing, and no data at all.
        other = received(collective, [*sent[1:], sent[0]], (rank + 1) % RANKS)
        if collective != "all_reduce":
            assert sum(wrong(other, piece) for piece in pieces) > 0
        missing = received(collective, [torch.zeros_like(one) if n == 1 else one for n, one in enumerate(sent)], rank)
        if collective != "sendrecv" or rank == 2:
            assert sum(wrong(missing, piece) for piece in pieces) > 0
        assert sum(wrong(torch.zeros_like(found), piece) for piece in pieces) == size.received


def test_sums_of_very_many_ranks_are_exact() -> None:
    (piece,) = expected_data("all_reduce", extent("all_reduce", 4000, 8000), 0, 8000)
    assert piece.weight * worker.BASES < 2**24

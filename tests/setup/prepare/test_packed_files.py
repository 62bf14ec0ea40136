"""First-fit packing: nothing is lost, nothing overflows, and it is the first pack that fits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.setup.prepare.packed_files import fill, first_fit, pack


def squad_like(count: int, seed: int = 7) -> np.ndarray:
    """Lengths spread like SQuAD's: mean 170, a long tail."""
    drawn = np.random.default_rng(seed).gamma(5.0, 34.0, count)
    return np.clip(drawn, 30, 900).astype(np.int64)


def slow_first_fit(lengths: list[int], seq_len: int) -> list[int]:
    """As in the textbook: every pack is looked at for every document."""
    room: list[int] = []
    numbers = []
    for length in lengths:
        number = next((n for n, free in enumerate(room) if free >= length), len(room))
        if number == len(room):
            room.append(seq_len)
        room[number] -= length
        numbers.append(number)
    return numbers


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(64, 128))
def test_every_document_goes_into_the_first_pack_with_room(lengths: list[int], seq_len: int) -> None:
    assert first_fit(lengths, seq_len) == slow_first_fit(lengths, seq_len)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(0, 3))
def test_no_document_is_lost_and_no_pack_overflows(lengths: list[int], seed: int) -> None:
    packing = pack(np.asarray(lengths, dtype=np.int64), 64, seed)
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))
    assert packing.packs[0] == 0
    assert packing.packs[-1] == len(lengths)
    for first, end in zip(packing.packs, packing.packs[1:], strict=False):
        assert 0 < sum(lengths[document] for document in packing.order[first:end]) <= 64


@pytest.mark.parametrize("seq_len", [2048, 4096])
def test_documents_like_squad_fill_98_percent_in_packs_that_cost_alike(seq_len: int) -> None:
    lengths = squad_like(20_000)
    packing = pack(lengths, seq_len, seed=1)
    assert packing.packer == "first-fit-shuffle"
    assert fill(packing, lengths, seq_len) >= 0.98
    squares = np.add.reduceat(lengths[packing.order] ** 2, packing.packs[:-1])[:-10]
    assert squares.std() < squares.mean() / 4


def test_documents_that_are_not_much_shorter_than_a_pack_are_packed_from_the_longest() -> None:
    lengths = np.random.default_rng(3).integers(10, 100, 5000)
    packing = pack(lengths, 128, seed=1)
    assert packing.packer == "first-fit-decreasing"
    assert fill(packing, lengths, 128) >= 0.98


def test_the_longest_first_is_taken_only_if_it_is_better() -> None:
    lengths = np.full(10, 65, dtype=np.int64)
    packing = pack(lengths, 128, seed=1)
    assert (packing.packer, len(packing.packs) - 1) == ("first-fit-shuffle", 10)


def test_the_seed_decides() -> None:
    lengths = squad_like(500)
    assert pack(lengths, 2048, 1).order.tolist() == pack(lengths, 2048, 1).order.tolist()
    assert pack(lengths, 2048, 1).order.tolist() != pack(lengths, 2048, 2).order.tolist()

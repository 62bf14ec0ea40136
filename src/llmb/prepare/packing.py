# SPDX-License-Identifier: Apache-2.0
"""Puts documents together into packs: first-fit, of shuffled documents or of the longest first. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmb.prepared.packed_dataset import Packer

if TYPE_CHECKING:
    import numpy as np

ENOUGH_FILL = 0.98


@dataclass(frozen=True, slots=True)
class Packs:
    """``order``: int64 [documents], documents by pack; ``packs``: int64 [packs + 1], the first of each in ``order``."""

    packer: Packer
    order: "np.ndarray"
    packs: "np.ndarray"


def pack(lengths: "np.ndarray", seq_len: int, seed: int) -> Packs:
    """Packs documents of ``lengths`` places, int64 [documents], none of them longer than ``seq_len``.

    Shuffled documents make packs that cost about the same, and are the default of NeMo. Where that leaves more than 2 %
    of the places empty, as with documents that are not much shorter than a pack, the longest come first, if that is
    better: such packs differ in their cost, but more of a step is real work.
    """
    shuffled = _first_fit(lengths, seq_len, seed, "first-fit-shuffle")
    if fill(shuffled, lengths, seq_len) >= ENOUGH_FILL:
        return shuffled
    decreasing = _first_fit(lengths, seq_len, seed, "first-fit-decreasing")
    return min(shuffled, decreasing, key=lambda packing: len(packing.packs))


def fill(packing: Packs, lengths: "np.ndarray", seq_len: int) -> float:
    """Share of the places of all packs that documents take."""
    return int(lengths.sum()) / ((len(packing.packs) - 1) * seq_len)


def _first_fit(lengths: "np.ndarray", seq_len: int, seed: int, packer: Packer) -> Packs:
    import numpy as np

    taken = np.random.default_rng(seed).permutation(len(lengths))
    if packer == "first-fit-decreasing":
        taken = taken[np.argsort(-lengths[taken], kind="stable")]
    places = first_fit(lengths[taken].tolist(), seq_len)
    number = np.asarray(places, dtype=np.int64)
    packs = np.concatenate([[0], np.cumsum(np.bincount(number))]).astype(np.int64)
    return Packs(packer, taken[np.argsort(number, kind="stable")].astype(np.int64), packs)


def first_fit(lengths: list[int], seq_len: int) -> list[int]:
    """The number of the pack of each document: the first one with enough room when the document's turn comes.

    A tree over packs holds the most room in each of its parts, so that a document takes logarithmic time. At most one
    pack is less than half full, which bounds their number.
    """
    leaves = 1
    while leaves < 2 * sum(lengths) // seq_len + 2:
        leaves *= 2
    room = [seq_len] * (2 * leaves)
    numbers = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        numbers.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return numbers

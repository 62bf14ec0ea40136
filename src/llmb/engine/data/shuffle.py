# SPDX-License-Identifier: Apache-2.0
"""A permutation that is computed place by place, so that a shuffle of any size needs neither memory nor preparation.

It does not depend on the version of a library, as generators of random numbers do: a run that resumes elsewhere trains
on the same order.
"""

import hashlib
import math

ROUNDS = 4
"""Each mixes both halves of a place; three already look random (Luby and Rackoff, 1988)."""


def shuffled(place: int, count: int, key: str) -> int:
    """The number at ``place`` of a permutation of 0 .. ``count`` - 1, which ``key`` selects.

    A Feistel network on a grid of at least ``count`` numbers; it is applied again to a number beyond ``count``, as
    described by Black and Rogaway (2002).
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    while True:
        row, column = divmod(place, columns)
        for number in range(ROUNDS):
            row = (row + _random(f"{key} {number} row {column}")) % rows
            column = (column + _random(f"{key} {number} column {row}")) % columns
        place = row * columns + column
        if place < count:
            return place


def _random(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

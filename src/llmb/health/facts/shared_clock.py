# SPDX-License-Identifier: Apache-2.0
"""This node's clock beside the one that dates new files of a folder, which all nodes have in common."""

import os
import time
from pathlib import Path
from typing import NamedTuple

ROUNDS = 5
TICK_S = 0.01
"""File systems date by a clock that may lag behind by one tick of the kernel, at most 1/100 s."""


class ClockReading(NamedTuple):
    ahead_s: float
    uncertainty_s: float


def read_shared_clock(folder: Path, name: str) -> ClockReading:
    """The most certain of several readings, each of a new file ``name`` that is removed. Raises OSError."""
    path = folder / name
    readings = []
    for _ in range(ROUNDS):
        before = time.time()
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            dated, after = os.fstat(handle).st_mtime, time.time()
        finally:
            os.close(handle)
            path.unlink()
        readings.append(reading(before, dated, after))
    return min(readings, key=lambda item: item.uncertainty_s)


def reading(before: float, dated: float, after: float) -> ClockReading:
    """Of a file that was made between two looks at this clock, and that the other one dated. Pure."""
    least, most = before - dated - TICK_S, after - dated
    return ClockReading((least + most) / 2, (most - least) / 2)

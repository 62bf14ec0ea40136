# SPDX-License-Identifier: Apache-2.0
"""Whether the clock is synchronized, by chrony or systemd."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmb.health.facts.source import FactSource, Missing

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
    """Reading of a file that was made between two looks at this clock, and that the other one dated. Pure."""
    least, most = before - dated - TICK_S, after - dated
    return ClockReading((least + most) / 2, (most - least) / 2)


LIMIT_S = 10.0
_OFFSET = re.compile(r"^System time\s*:\s*(\d+\.\d+) seconds (slow|fast) of NTP time", re.MULTILINE)
LEAPS = ("Normal", "Insert second", "Delete second")
"""What chrony calls a clock that follows its servers."""
_LEAP = re.compile(r"^Leap status\s*:\s*(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    synchronized: bool
    by: str
    ahead_s: float | None
    """How far it is ahead of the servers; None is not known."""


def read_clock(source: FactSource) -> ClockFacts | Missing:
    said = source.ask(["chronyc", "-n", "tracking"], LIMIT_S)
    leap = _LEAP.search(said.text)
    if said.problem is None and leap:
        offset = _OFFSET.search(said.text)
        ahead_s = None if offset is None else float(offset[1]) * (1 if offset[2] == "fast" else -1)
        return ClockFacts(synchronized=leap[1] in LEAPS, by="chrony", ahead_s=ahead_s)
    said = source.ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"], LIMIT_S)
    if said.problem is None and said.text.strip() in ("yes", "no"):
        return ClockFacts(synchronized=said.text.strip() == "yes", by="systemd", ahead_s=None)
    return Missing(f"neither chronyc nor timedatectl answers ({said.problem or 'no output'})")

# SPDX-License-Identifier: Apache-2.0
"""Checks of the clock: beside its time servers, by chrony or systemd, and beside the clock of the file server."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmb.health.rules import Finding, rule
from llmb.health.source import FactSource
from llmb.missing import Missing

ROUNDS = 5
TICK_S = 0.01
"""File systems date by a clock that may lag behind by one tick of the kernel, at most 1/100 s."""
LIMIT_S = 10.0
LEAPS = ("Normal", "Insert second", "Delete second")
"""What chrony calls a clock that follows its servers."""
_OFFSET = re.compile(r"^System time\s*:\s*(\d+\.\d+) seconds (slow|fast) of NTP time", re.MULTILINE)
_LEAP = re.compile(r"^Leap status\s*:\s*(.+?)\s*$", re.MULTILINE)


class ClockReading(NamedTuple):
    """How far this clock is before the one that dates new files in a folder; negative if it is behind."""

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


def clock_checks(source: FactSource, file_server: ClockReading | Missing) -> Iterator[Finding]:
    yield _synchronized(source)
    of = rule("clock_file_server")
    if isinstance(file_server, Missing):
        yield of.skipped(file_server.reason)
        return
    ahead_s = file_server.ahead_s
    side = "ahead of" if ahead_s > 0 else "behind"
    yield of.measured(abs(ahead_s), f"{abs(ahead_s):.3f} s {side} the file server")


def _synchronized(source: FactSource) -> Finding:
    of = rule("clock_synchronized")
    said = source.ask(["chronyc", "-n", "tracking"], LIMIT_S)
    leap, offset = _LEAP.search(said.text), _OFFSET.search(said.text)
    if said.problem is None and leap:
        if leap[1] not in LEAPS:
            return of.found("warn", "no (chrony)")
        if offset is None:
            return of.passed("yes (chrony)")
        side = "ahead" if offset[2] == "fast" else "behind"
        return of.measured(float(offset[1]), f"{float(offset[1]):.6f} s {side} (chrony)", "skewed")
    said = source.ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"], LIMIT_S)
    if said.problem is None and said.text.strip() in ("yes", "no"):
        fit = said.text.strip() == "yes"
        return of.found("pass" if fit else "warn", f"{said.text.strip()} (systemd)")
    return of.skipped(f"neither chronyc nor timedatectl answers ({said.problem or 'no output'})")

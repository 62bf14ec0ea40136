# SPDX-License-Identifier: Apache-2.0
"""File systems of the folders that runs write to."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmb.health.facts.source import FactSource, Missing

PROBE = Path(__file__).with_name("disk_probe.py")
DIRECTION_S = 15.0
"""How long writing, and reading, may take; what is done by then gives the rate."""
LIMIT_S, SPACE_S = 60.0, 20.0
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    device: str
    folder: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes and seconds; ``direct`` is past the page cache."""

    written: int
    write_s: float
    direct: bool
    read: int
    read_s: float
    direct_read: bool
    clock_ahead_s: float
    """How far this node's clock is before the clock that dates new files; negative if it is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """One folder, or the nearest one above it that exists."""

    path: str
    exists: bool
    writable: bool
    device: int
    free: int
    total: int
    free_inodes: int
    inodes: int
    """0 on a file system that has no table of them."""
    mount: Mount | None
    rates: Rates | Missing


def read_disk(source: FactSource, folder: Path, size: int) -> DiskFacts | Missing:
    """``size`` of the test file in bytes; 0 for none."""
    command = [sys.executable, "-I", str(PROBE), str(folder), str(size), str(DIRECTION_S)]
    said = source.ask(command, LIMIT_S if size else SPACE_S)
    found = _documents(said.text)
    space = found.get("space")
    problem = (said.problem or "").replace(sys.executable, "the file system", 1) if said.timed_out else said.problem
    if space is None:
        return Missing(problem or "the folder cannot be measured")
    rates: Rates | Missing = Missing("not measured: --no-disk")
    if size:
        measured = found.get("rates") or {"problem": problem or "it ended early"}
        told = measured.get("problem")
        rates = Missing(f"writing failed: {told}") if told else Rates(**measured)
    return DiskFacts(**space, mount=mount_of(space["path"], source.text("/proc/mounts") or ""), rates=rates)


def _documents(text: str) -> dict[str, Any]:
    """What was printed before a failure, too."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        found.update(document if isinstance(document, dict) else {})
    return found


def mount_of(path: str, mounts: str) -> Mount | None:
    """What a path is on, by the content of /proc/mounts; of several at one place the last one is seen."""
    rows = (line.split() for line in mounts.splitlines())
    found = [Mount(row[0], _plain(row[1]), row[2]) for row in rows if len(row) >= 3]
    fits = [mount for mount in found if Path(path).is_relative_to(mount.folder)]
    return max(reversed(fits), key=lambda mount: len(mount.folder), default=None)


def _plain(text: str) -> str:
    """Spaces in names are octal there."""
    return _OCTAL.sub(lambda code: chr(int(code[1], 8)), text)

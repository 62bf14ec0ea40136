# SPDX-License-Identifier: Apache-2.0
"""The processes of this node: those of one run, their CPU time, and other runs of llmb beside them.

Only the standard library is imported, as the sampler does.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.resources.sample import SeenRun

ROOT = Path("/")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WORKERS = (b"llmb.engine.", b"llmb.bench.worker", b"llmb.weights.worker")
"""What trains, measures or converts begins with this behind ``-m``."""
PARENT, USER, CHILDREN_SYSTEM, BEGAN = 1, 11, 14, 19
"""Places in /proc/<pid>/stat behind the name: times are those of the process, then of its ended children."""
Key = tuple[int, str]
"""Process id and what tells it from a later one: when it began, and what it is called since its last exec."""


@dataclass(frozen=True, slots=True)
class _Stat:
    key: Key
    parent: int
    began_s: float
    """Since the boot."""
    own_s: float
    """CPU time without that of ended children."""
    cpu_s: float
    """With it."""


class NodeProcesses:
    """What is looked at again and again: command lines are read once per process."""

    def __init__(self, folder: Path | None = None, root: Path = ROOT) -> None:
        """``folder`` is that of the own run: its processes are those that name it, and all that they start."""
        self.folder = None if folder is None else os.fsencode(folder)
        self.root = root
        self.words: dict[Key, tuple[bytes, ...]] = {}
        self.own: dict[int, _Stat] = {}
        self.above: dict[int, _Stat] = {}
        """Ancestors of the run's processes that are none themselves."""
        self.ended_s = 0.0
        """CPU time of own processes that ended, and are no ended children of another."""
        self.boot_s = _boot_s(root)

    def look(self) -> None:
        """Reads all processes. Of those that end meanwhile nothing is known."""
        self.stats = {stat.key[0]: stat for stat in _stats(self.root)}
        known = self.words
        self.words = {stat.key: known.get(stat.key) or _words(self.root, pid) for pid, stat in self.stats.items()}
        own = self._family([pid for pid, stat in self.stats.items() if self._is_named(stat)])
        for pid, stat in self.own.items():
            if pid not in own and stat.parent not in own:
                self.ended_s += stat.cpu_s
        self.own = own
        self._find_above()

    def cpu_s(self) -> float | None:
        """CPU time of the run's processes, and of those that started them; None where no process of the run is seen."""
        if not self.own:
            return None
        above_s = sum(stat.own_s for stat in self.above.values())
        return round(self.ended_s + sum(stat.cpu_s for stat in self.own.values()) + above_s, 2)

    def others(self) -> tuple[SeenRun, ...]:
        """Other runs, by what they began with; the processes of one run count once."""
        found: dict[tuple[str, str | None], SeenRun] = {}
        for pid, stat in sorted(self.stats.items(), key=lambda item: item[1].began_s):
            if pid not in self.own and pid not in self.above and (named := _llmb_program(self.words[stat.key])):
                since_s = None if self.boot_s is None else round(self.boot_s + stat.began_s, 1)
                found.setdefault(named, SeenRun(program=named[0], folder=named[1], pid=pid, since_s=since_s))
        return tuple(found.values())

    def _is_named(self, stat: _Stat) -> bool:
        if self.folder is None:
            return stat.key[0] == os.getpid()
        words = self.words[stat.key]
        return any(word == self.folder or word.startswith(self.folder + b"/") for word in words)

    def _family(self, roots: list[int]) -> dict[int, _Stat]:
        children: dict[int, list[int]] = {}
        for pid, stat in self.stats.items():
            children.setdefault(stat.parent, []).append(pid)
        found = dict.fromkeys(roots)
        todo = list(found)
        for pid in todo:
            new = [child for child in children.get(pid, ()) if child not in found]
            found |= dict.fromkeys(new)
            todo += new
        return {pid: self.stats[pid] for pid in found}

    def _find_above(self) -> None:
        """Processes that end are kept as they were: CPU time only grows."""
        self.above = {pid: self.stats.get(pid, stat) for pid, stat in self.above.items()}
        for member in self.own.values():
            parent = self.stats.get(member.parent)
            while parent and parent.key[0] not in self.above:
                if parent.key[0] not in self.own:
                    self.above[parent.key[0]] = parent
                parent = self.stats.get(parent.parent)


def _llmb_program(words: tuple[bytes, ...]) -> tuple[str, str | None] | None:
    """Module and folder of a process that trains, measures or converts; None for any other."""
    for place, word in enumerate(words[1:], start=1):
        if word.startswith(WORKERS) and words[place - 1] == b"-m":
            folder = words[place + 1] if place + 1 < len(words) else b""
            return os.fsdecode(word), os.fsdecode(folder) if folder.startswith(b"/") else None
    return None


def _stats(root: Path) -> Iterator[_Stat]:
    try:
        folders = [path for path in (root / "proc").iterdir() if path.name.isdigit()]
    except OSError:
        return
    for folder in folders:
        try:
            text = (folder / "stat").read_text(errors="replace")
            program, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            times = [int(field) / TICKS_PER_S for field in fields[USER : CHILDREN_SYSTEM + 1]]
            yield _Stat(
                key=(int(folder.name), f"{fields[BEGAN]} {program}"),
                parent=int(fields[PARENT]),
                began_s=int(fields[BEGAN]) / TICKS_PER_S,
                own_s=sum(times[:2]),
                cpu_s=sum(times),
            )
        except (OSError, ValueError, IndexError):
            continue


def _words(root: Path, pid: int) -> tuple[bytes, ...]:
    try:
        return tuple((root / "proc" / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0"))
    except OSError:
        return ()


def _boot_s(root: Path) -> float | None:
    """In Unix time."""
    try:
        lines = (root / "proc" / "stat").read_text().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), None)
    except (OSError, ValueError, IndexError):
        return None

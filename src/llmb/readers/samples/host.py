# SPDX-License-Identifier: Apache-2.0
"""Reads the state of this node from the Linux kernel's files below ``root``; also its name and cores."""

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from llmb.base.input_files import SystemFiles
from llmb.base.missing import Missing
from llmb.readers.samples.sample_records import HostSample, OtherRun

Device = Literal["cpu", "cuda"]


def host_name() -> str:
    """Return the scheduler's name for this node, or else the hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


ROOT = Path("/")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POWERCAP = "sys/class/powercap"
IDLE, IOWAIT, STEAL, TIMES = 3, 4, 7, 8
"""Indices in the first line of /proc/stat, and the number of fields to sum; later fields are parts of these."""
OF_PROCESSES = slice(0, 3)
"""User, nice and system: the times that processes also report."""


class CpuEnergy:
    """The energy of the CPU packages; read it often, as counters wrap around.

    The constructor raises OSError or ValueError.
    """

    def __init__(self, zones: tuple[Path, ...]) -> None:
        self.zones = zones
        self.ranges = {zone: _number(zone / "max_energy_range_uj") for zone in zones}
        self.last = {zone: _number(zone / "energy_uj") for zone in zones}
        self.total_uj = 0

    def read_j(self) -> float | None:
        """Return the energy (J) since this object was created; None if a counter cannot be read."""
        for zone in self.zones:
            try:
                now = _number(zone / "energy_uj")
            except (OSError, ValueError):
                return None
            risen = now - self.last[zone]
            self.total_uj += risen if risen >= 0 else risen + self.ranges[zone]
            self.last[zone] = now
        return self.total_uj / 1e6


def find_cpu_energy(root: Path = ROOT) -> CpuEnergy | Missing:
    zones = tuple(path for path in sorted((root / POWERCAP).glob("intel-rapl:*")) if path.name.count(":") == 1)
    try:
        packages = tuple(zone for zone in zones if (zone / "name").read_text().startswith("package"))
        if not packages:
            return Missing(f"the kernel has no counters of CPU energy in /{POWERCAP}")
        return CpuEnergy(packages)
    except OSError as error:
        return Missing(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return Missing(f"/{POWERCAP}: {error}")


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """The number of cores that a control group may use, and the file with its throttled time."""

    cores: float
    file: Path

    def throttled_s(self) -> float | None:
        """Return the throttled seconds; None if unreadable."""
        try:
            counts = dict(line.split() for line in self.file.read_text().splitlines())
            if "throttled_usec" in counts:
                return int(counts["throttled_usec"]) / 1e6
            return int(counts["throttled_time"]) / 1e9
        except (OSError, ValueError, KeyError):
            return None


def find_cpu_limit(root: Path = ROOT) -> CpuLimit | None:
    """Return the tightest CPU limit of this process's control groups; None if there is no readable limit."""
    groups = {folder: _cores_of(folder) for folder in cgroup_folders(root, "cpu")}
    limits = (CpuLimit(cores, folder / "cpu.stat") for folder, cores in groups.items() if cores is not None)
    return min(limits, key=lambda limit: limit.cores, default=None)


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's control group for a controller, in cgroup v1 or v2, and its parent groups."""
    for line in (SystemFiles(root=root).text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")
        yield group
        # In a container, the path may be the host's, and the container's own group is at the mount point.
        yield from takewhile(mount.parent.__ne__, group.parents)


def _cores_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max" is not a limit


def read_host(worker: int, energy: CpuEnergy | None, limit: CpuLimit | None = None, root: Path = ROOT) -> HostSample:
    """Sample this node; ``worker`` is the id of the process whose memory is sampled, or 0."""
    files = SystemFiles(root=root)
    words = (files.text("/proc/stat") or "").partition("\n")[0].split()[1 : 1 + TIMES]
    times = (
        [int(word) / TICKS_PER_S for word in words] if len(words) == TIMES and all(map(str.isdecimal, words)) else []
    )
    load = re.match(r"\d+(\.\d+)?", files.text("/proc/loadavg") or "")
    pages = re.match(r"\d+ (\d+)", files.text(f"/proc/{worker}/statm") or "")
    memory = re.findall(r"^(MemTotal|MemAvailable):\s*(\d+)", files.text("/proc/meminfo") or "", re.MULTILINE)
    kib = {name: int(number) for name, number in memory}
    idle = times[IDLE] + times[IOWAIT] + times[STEAL] if times else 0.0
    return HostSample(
        cpu_busy_s=round(sum(times) - idle, 2) if times else None,
        cpu_iowait_s=times[IOWAIT] if times else None,
        cpu_steal_s=times[STEAL] if times else None,
        cpu_used_s=round(sum(times[OF_PROCESSES]), 2) if times else None,
        cpu_throttled_s=limit.throttled_s() if limit else None,
        cpu_total_s=round(sum(times), 2) if times else None,
        load=float(load[0]) if load else None,
        # Total memory less what a process could still allocate.
        memory_used_bytes=(kib["MemTotal"] - kib["MemAvailable"]) * 1024 if len(kib) == 2 else None,
        worker_memory_bytes=int(pages[1]) * PAGE_BYTES if pages else None,
        cpu_energy_j=energy.read_j() if energy else None,
    )


def _number(path: Path) -> int:
    return int(path.read_text())


WORKERS = (b"llmb.engine.", b"llmb.nodes.bench.worker", b"llmb.engine.weights")
"""Beginnings of the modules, after ``-m``, of processes that train, measure or convert."""
WAITS = b"llmb.engine.join"
"""The program of a rank that waits for its run and computes nothing."""
PARENT, USER, CHILDREN_SYSTEM, BEGAN = 1, 11, 14, 19
"""Indices of fields after the name in /proc/<pid>/stat. From USER on: two times of the process, two of its children."""
Key = tuple[int, str]
"""Process id, and start time with the name since the last exec."""


@dataclass(frozen=True, slots=True)
class _Stat:
    key: Key
    parent: int
    began_s: float
    """Seconds since boot."""
    cpu_time_s: float
    """CPU time of the process itself."""
    cpu_s: float
    """CPU time of the process and its ended children."""


class NodeProcesses:
    """The processes of a node, read repeatedly."""

    def __init__(self, folder: Path | None = None, root: Path = ROOT) -> None:
        """The run has the processes with ``folder`` in their command lines (None: only this process), and all their
        descendants."""
        self.folder = None if folder is None else os.fsencode(folder)
        self.root = root
        self.words: dict[Key, tuple[bytes, ...]] = {}
        self.own: dict[int, _Stat] = {}
        self.above: dict[int, _Stat] = {}
        """Ancestors of the run's processes that do not belong to it."""
        self.ended_s = 0.0
        """CPU time of ended processes of the run whose parents do not belong to it."""
        booted = re.search(r"^btime (\d+)", SystemFiles(root=root).text("/proc/stat") or "", re.MULTILINE)
        self.boot_s = float(booted[1]) if booted else None
        """The time of boot, in Unix time."""

    def look(self) -> None:
        """Read all processes, except those that end meanwhile."""
        self.stats = {stat.key[0]: stat for stat in _stats(self.root)}
        words = self.words
        self.words = {stat.key: words.get(stat.key) or _words(self.root, pid) for pid, stat in self.stats.items()}
        family = self._family([pid for pid, stat in self.stats.items() if self._is_named(stat)])
        for pid, stat in self.own.items():
            if pid not in family and stat.parent not in family:
                self.ended_s += stat.cpu_s
        self.own = family
        self._find_above()

    def cpu_s(self) -> float | None:
        """Return the CPU time of the run's processes and their ancestors; None if the run has no process."""
        if not self.own:
            return None
        above_s = sum(stat.cpu_time_s for stat in self.above.values())
        return round(self.ended_s + sum(stat.cpu_s for stat in self.own.values()) + above_s, 2)

    def others(self) -> tuple[OtherRun, ...]:
        """Return the other runs on this node, each with its first process."""
        runs: dict[tuple[str, str | None], OtherRun] = {}
        for pid, stat in sorted(self.stats.items(), key=lambda item: item[1].began_s):
            if pid not in self.own and pid not in self.above and (program := _llmb_program(self.words[stat.key])):
                since_s = None if self.boot_s is None else round(self.boot_s + stat.began_s, 1)
                runs.setdefault(program, OtherRun(program=program[0], folder=program[1], pid=pid, since_s=since_s))
        return tuple(runs.values())

    def _is_named(self, stat: _Stat) -> bool:
        if self.folder is None:
            return stat.key[0] == os.getpid()
        words = self.words[stat.key]
        return any(word == self.folder or word.startswith(self.folder + b"/") for word in words)

    def _family(self, roots: list[int]) -> dict[int, _Stat]:
        children: dict[int, list[int]] = {}
        for pid, stat in self.stats.items():
            children.setdefault(stat.parent, []).append(pid)
        pids = dict.fromkeys(roots)
        todo = list(pids)
        for pid in todo:
            new = [child for child in children.get(pid, ()) if child not in pids]
            pids |= dict.fromkeys(new)
            todo += new
        return {pid: self.stats[pid] for pid in pids}

    def _find_above(self) -> None:
        """Update the ancestors of the run's processes. Ended ancestors are kept, so that the CPU time never falls."""
        self.above = {pid: self.stats.get(pid, stat) for pid, stat in self.above.items()}
        for member in self.own.values():
            parent = self.stats.get(member.parent)
            while parent and parent.key[0] not in self.above:
                if parent.key[0] not in self.own:
                    self.above[parent.key[0]] = parent
                parent = self.stats.get(parent.parent)


def _llmb_program(words: tuple[bytes, ...]) -> tuple[str, str | None] | None:
    for place, word in enumerate(words[1:], start=1):
        if word.startswith(WORKERS) and word != WAITS and words[place - 1] == b"-m":
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
                cpu_time_s=sum(times[:2]),
                cpu_s=sum(times),
            )
        except (OSError, ValueError, IndexError):
            continue


def _words(root: Path, pid: int) -> tuple[bytes, ...]:
    try:
        return tuple((root / "proc" / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0"))
    except OSError:
        return ()

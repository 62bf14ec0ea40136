# SPDX-License-Identifier: Apache-2.0
"""Reads CPU, memory and CPU energy of this node from the files of the Linux kernel, below ``root``."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.missing import Missing
from llmb.resources.sample import HostSample

ROOT = Path("/")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POWERCAP = "sys/class/powercap"
IDLE, IOWAIT, STEAL, TIMES = 3, 4, 7, 8
"""Places in the first line of /proc/stat, and how many there are without those that others include."""
OF_PROCESSES = slice(0, 3)
"""User, nice and system: what is counted of processes, too."""


class CpuEnergy:
    """The energy of the CPU packages. Their counters wrap around, so it must be read more often than they do.

    Raises OSError if a counter cannot be read.
    """

    def __init__(self, zones: tuple[Path, ...]) -> None:
        self.zones = zones
        self.ranges = {zone: _number(zone / "max_energy_range_uj") for zone in zones}
        self.last = {zone: _number(zone / "energy_uj") for zone in zones}
        self.total_uj = 0

    def read_j(self) -> float | None:
        """Since this object was made."""
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
    """How many cores the run's control group may use, and the file that counts how long it was stopped for that."""

    cores: float
    file: Path

    def throttled_s(self) -> float | None:
        """Version 2 counts microseconds, version 1 nanoseconds."""
        try:
            counts = dict(line.split() for line in self.file.read_text().splitlines())
            if "throttled_usec" in counts:
                return int(counts["throttled_usec"]) / 1e6
            return int(counts["throttled_time"]) / 1e9
        except (OSError, ValueError, KeyError):
            return None


def find_cpu_limit(root: Path = ROOT) -> CpuLimit | None:
    """The tightest of the control groups above this process; None without one that can be read."""
    return min(_cpu_limits(root), key=lambda limit: limit.cores, default=None)


def _cpu_limits(root: Path) -> Iterator[CpuLimit]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controllers}")
        below = mount / path.lstrip("/")
        # Inside of a container the path may be the host's, and the container's own group is the mount.
        for folder in (below, *below.parents):
            if folder == mount.parent:
                break
            if (cores := _cores_of(folder)) is not None:
                yield CpuLimit(cores, folder / "cpu.stat")


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
    """``worker`` is the process whose memory is sampled."""
    times = _cpu_times(root)
    idle = times[IDLE] + times[IOWAIT] + times[STEAL] if times else 0.0
    return HostSample(
        cpu_busy_s=round(sum(times) - idle, 2) if times else None,
        cpu_iowait_s=times[IOWAIT] if times else None,
        cpu_steal_s=times[STEAL] if times else None,
        cpu_used_s=round(sum(times[OF_PROCESSES]), 2) if times else None,
        cpu_throttled_s=limit.throttled_s() if limit else None,
        cpu_total_s=round(sum(times), 2) if times else None,
        load=_load(root),
        memory_used_bytes=_memory_used(root),
        worker_memory_bytes=_resident(root, worker),
        cpu_energy_j=energy.read_j() if energy else None,
    )


def _cpu_times(root: Path) -> list[float] | None:
    try:
        with (root / "proc/stat").open() as stream:
            words = stream.readline().split()[1 : 1 + TIMES]
        return [int(word) / TICKS_PER_S for word in words] if len(words) == TIMES else None
    except (OSError, ValueError):
        return None


def _load(root: Path) -> float | None:
    try:
        return float((root / "proc/loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _memory_used(root: Path) -> int | None:
    """What the node has less what could be given to a process."""
    try:
        text = (root / "proc/meminfo").read_text()
    except (OSError, ValueError):
        return None
    found = {name: int(kib) for name, kib in re.findall(r"^(MemTotal|MemAvailable):\s*(\d+)", text, re.MULTILINE)}
    return (found["MemTotal"] - found["MemAvailable"]) * 1024 if len(found) == 2 else None


def _resident(root: Path, pid: int) -> int | None:
    try:
        return int((root / f"proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int:
    return int(path.read_text())

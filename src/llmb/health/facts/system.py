# SPDX-License-Identifier: Apache-2.0
"""CPUs, memory, kernel settings and limits of processes, from /proc and /sys."""

import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmb.health.facts.source import FactSource
from llmb.site.machine import usable_cores

CPU, NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"
LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """None, or empty, is not visible."""

    model: str | None
    governors: dict[str, int]
    """CPUs by their governor."""
    preference: str | None
    """For energy or performance, where the hardware chooses clocks."""
    deepest_state: tuple[str, int] | None
    """Name of the deepest idle state that is enabled, and the microseconds that leaving it takes."""
    numa_nodes: int
    gpus_without_node: int
    """PCI devices of NVIDIA without a NUMA node, if there are several nodes."""
    threads_per_core: int | None
    online: int | None
    allowed: float
    """By affinity and by the quota of the control group."""
    load: float | None
    """Processes that ran or waited for a CPU, in the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """In bytes; None is not visible."""

    total: int | None
    available: int | None
    swap_used: int | None
    huge_pages: int
    """Reserved ones that are free."""
    shm_size: int | None
    """Size of /dev/shm; None without it."""
    shm_free: int | None
    corrected: int | None
    uncorrected: int | None
    """Errors of memory that the memory controllers have counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    version: str | None
    transparent_hugepage: str | None
    numa_balancing: int | None
    numa_nodes: int
    command_line: str | None
    iommu_types: dict[str, int]
    """Groups of devices by how their addresses are translated; empty without an IOMMU."""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Soft and hard limits of this process by name; None is unlimited."""

    limits: dict[str, tuple[int | None, int | None]]
    memory: int | None
    """Bytes that its control group may use, such as a job's; None is unlimited."""
    total: int | None
    """Bytes of the node."""


def read_cpu(source: FactSource) -> CpuFacts:
    cpus = [name for name in source.names(CPU) if re.fullmatch(r"cpu\d+", name)]
    governors = (source.text(f"{CPU}/{cpu}/cpufreq/scaling_governor") for cpu in cpus)
    threads = {_size(source.text(f"{CPU}/{cpu}/topology/thread_siblings_list")) for cpu in cpus} - {0}
    model = re.search(r"^model name\s*:\s*(.+)$", source.text("/proc/cpuinfo") or "", re.MULTILINE)
    nodes = numa_nodes(source)
    load = re.match(r"\d+\.\d+", source.text("/proc/loadavg") or "")
    return CpuFacts(
        model=model[1].strip() if model else None,
        governors=dict(Counter(filter(None, governors))),
        preference=source.text(f"{CPU}/cpu0/cpufreq/energy_performance_preference"),
        deepest_state=_deepest_state(source),
        numa_nodes=nodes,
        gpus_without_node=_without_node(source) if nodes > 1 else 0,
        threads_per_core=max(threads, default=None),
        online=_size(source.text(f"{CPU}/online")) or None,
        allowed=allowed_cpus(source),
        load=float(load[0]) if load else None,
    )


def numa_nodes(source: FactSource) -> int:
    return sum(re.fullmatch(r"node\d+", name) is not None for name in source.names(NODES))


def _deepest_state(source: FactSource) -> tuple[str, int] | None:
    folder = f"{CPU}/cpu0/cpuidle"
    found = [
        (latency, source.text(f"{folder}/{state}/name") or state)
        for state in source.names(folder)
        if source.number(f"{folder}/{state}/disable") != 1
        and (latency := source.number(f"{folder}/{state}/latency")) is not None
    ]
    return max(found)[::-1] if found else None


def _without_node(source: FactSource) -> int:
    devices = (f"/sys/bus/pci/devices/{name}" for name in source.names("/sys/bus/pci/devices"))
    return sum(
        source.text(f"{device}/vendor") == "0x10de" and source.number(f"{device}/numa_node") == -1 for device in devices
    )


def _size(text: str | None) -> int:
    """Number of entries of a list such as ``0-3,8``; 0 for other text."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text or "")
    return sum(int(last or first) - int(first) + 1 for first, last in parts)


def read_memory(source: FactSource) -> MemoryFacts:
    text = source.text("/proc/meminfo") or ""
    sizes = {name: int(size) for name, size in re.findall(r"^(\S+):\s+(\d+)", text, re.MULTILINE)}
    kib = {name: size * 1024 for name, size in sizes.items()}
    swap = kib["SwapTotal"] - kib["SwapFree"] if {"SwapTotal", "SwapFree"} <= kib.keys() else None
    shm = _shm(source)
    return MemoryFacts(
        total=kib.get("MemTotal"),
        available=kib.get("MemAvailable"),
        swap_used=swap,
        huge_pages=sizes.get("HugePages_Free", 0) * kib.get("Hugepagesize", 0),
        shm_size=shm and shm[0],
        shm_free=shm and shm[1],
        corrected=_edac(source, "ce_count"),
        uncorrected=_edac(source, "ue_count"),
    )


def _shm(source: FactSource) -> tuple[int, int] | None:
    try:
        found = os.statvfs(source.path("/dev/shm"))  # noqa: S108 (the kernel's own name)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _edac(source: FactSource, counter: str) -> int | None:
    folder = "/sys/devices/system/edac/mc"
    controllers = [name for name in source.names(folder) if re.fullmatch(r"mc\d+", name)]
    counts = [source.number(f"{folder}/{name}/{counter}") for name in controllers]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def read_kernel(source: FactSource) -> KernelFacts:
    pages = re.search(r"\[(\w+)\]", source.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    groups = "/sys/kernel/iommu_groups"
    types = (source.text(f"{groups}/{group}/type") for group in source.names(groups))
    return KernelFacts(
        version=source.text("/proc/sys/kernel/osrelease"),
        transparent_hugepage=pages[1] if pages else None,
        numa_balancing=source.number("/proc/sys/kernel/numa_balancing"),
        numa_nodes=numa_nodes(source),
        command_line=source.text("/proc/cmdline"),
        iommu_types=dict(Counter(filter(None, types))),
    )


def allowed_cpus(source: FactSource) -> float:
    quotas = [re.fullmatch(r"(\d+) (\d+)", text) for text in group_values(source, "", "cpu.max")]
    found = [int(quota[1]) / int(quota[2]) for quota in quotas if quota and int(quota[2])]
    return min([float(usable_cores()), *found])


def group_values(source: FactSource, controller: str, name: str) -> Iterator[str]:
    """What a file says in each of this process's control groups, up to the root; no ``controller`` is version 2."""
    for line in (source.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller not in controllers.split(","):
            continue
        group = PurePosixPath("/" + path.lstrip("/"))
        for folder in (group, *group.parents):
            text = source.text(f"/sys/fs/cgroup/{controller}{folder}/{name}")
            if text is not None:
                yield text


def group_memory(source: FactSource) -> int | None:
    files = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
    texts = [text for controller, name in files for text in group_values(source, controller, name)]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def read_limits(source: FactSource) -> LimitFacts:
    def known(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    found = {name: resource.getrlimit(number) for name, number in LIMITS.items()}
    limits = {name: (known(soft), known(hard)) for name, (soft, hard) in found.items()}
    return LimitFacts(limits, group_memory(source), read_memory(source).total)

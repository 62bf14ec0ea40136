# SPDX-License-Identifier: Apache-2.0
"""Checks of CPUs, memory, kernel settings, process limits and the clock.

The clock is compared with time servers, through chrony or systemd, and with the clock of the file server.
"""

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

from llmb.base.input_files import SystemFiles
from llmb.base.missing import Missing
from llmb.base.shown_text import counted, listed
from llmb.nodes.doctor.check_records import Status
from llmb.nodes.doctor.facts import FactSource, TargetFacts
from llmb.nodes.doctor.rules import GIB, Finding, gib, rule
from llmb.readers.samples.host import cgroup_folders, find_cpu_limit

CPU, NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"
DEVICES, NVIDIA = "/sys/bus/pci/devices", "0x10de"
UNSEEN = "Linux does not report it here"
NOT_IN_GUESTS = f"{UNSEEN}, as in most virtual machines"


def cpu_checks(source: FactSource, target: TargetFacts) -> Iterator[Finding]:
    cpus = [name for name in source.names(CPU) if re.fullmatch(r"cpu\d+", name)]
    online = _length(source.text(f"{CPU}/online"))
    yield _governor(source, cpus)
    yield _idle_states(source)
    yield _numa(source)
    of, threads = rule("cpu_threads"), [_length(source.text(f"{CPU}/{c}/topology/thread_siblings_list")) for c in cpus]
    yield of.passed(f"{max(threads)} per core") if any(threads) else of.skipped(UNSEEN)
    yield _allowed(allowed_cpus(source), online, target)
    of, load = rule("cpu_load"), re.match(r"\d+\.\d+", source.text("/proc/loadavg") or "")
    if load and online:
        processes = float(load[0])
        yield of.measured(100 * processes / online, f"{processes:g} processes on {counted(online, 'CPU')}")
    else:
        yield of.skipped(UNSEEN)


def _length(text: str | None) -> int:
    """Return the number of CPUs in a list such as ``0-3,8``; 0 if it is empty or missing."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text or "")
    return sum(int(last or first) - int(first) + 1 for first, last in parts)


def _governor(source: FactSource, cpus: list[str]) -> Finding:
    """Check that the frequency governors of all CPUs, or else the energy preference of CPU 0, favor performance."""
    of = rule("cpu_governor")
    governors = Counter(filter(None, (source.text(f"{CPU}/{cpu}/cpufreq/scaling_governor") for cpu in cpus)))
    if not governors:
        return of.skipped(NOT_IN_GUESTS)
    others = {name: count for name, count in governors.items() if name != "performance"}
    if not others or source.text(f"{CPU}/cpu0/cpufreq/energy_performance_preference") == "performance":
        return of.passed("performance")
    return of.check("warn", listed(f"{name} on {counted(count, 'CPU')}" for name, count in others.items()))


def _idle_states(source: FactSource) -> Finding:
    of, folder = rule("cpu_idle_states"), f"{CPU}/cpu0/cpuidle"
    texts = [
        (latency, source.text(f"{folder}/{state}/name") or state)
        for state in source.names(folder)
        if source.number(f"{folder}/{state}/disable") != 1
        and (latency := source.number(f"{folder}/{state}/latency")) is not None
    ]
    if not texts:
        return of.skipped(NOT_IN_GUESTS)
    microseconds, name = max(texts)
    return of.measured(microseconds, f"{name}, {microseconds} µs to exit")


def _numa(source: FactSource) -> Finding:
    of, nodes = rule("cpu_numa"), _numa_nodes(source)
    if not nodes:
        return of.skipped(UNSEEN)
    devices = (f"{DEVICES}/{name}" for name in source.names(DEVICES))
    on_none = sum(
        source.text(f"{device}/vendor") == NVIDIA and source.number(f"{device}/numa_node") == -1 for device in devices
    )
    text = counted(nodes, "NUMA node")
    if nodes > 1 and on_none:
        return of.check("warn", f"{text}; {counted(on_none, 'NVIDIA device')} on none of them")
    return of.passed(text)


def _numa_nodes(source: FactSource) -> int:
    return sum(re.fullmatch(r"node\d+", name) is not None for name in source.names(NODES))


def _allowed(allowed: float, online: int, target: TargetFacts) -> Finding:
    of = rule("cpu_allowed")
    text = f"{allowed:g} of {counted(int(online or allowed), 'CPU')}"
    if not target.gpus:
        return of.passed(text)
    return of.measured(allowed / target.gpus, f"{text}, for {counted(target.gpus, 'GPU')}")


def allowed_cpus(source: FactSource) -> float:
    """Return the number of CPUs that both the affinity and the cgroup's quota allow."""
    limit = find_cpu_limit(source.root)
    return min(float(source.cores()), limit.cores if limit else inf)


def memory_checks(source: FactSource) -> Iterator[Finding]:
    memory = _memory(source)
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    of = rule("memory_size_gib")
    yield of.passed(round(total / GIB)) if total else of.skipped(UNSEEN)
    of = rule("memory_available")
    if total and available is not None:
        yield of.measured(100 * available / total, f"{gib(available)} of {gib(total)} available")
    else:
        yield of.skipped(UNSEEN)
    of = rule("memory_swap")
    if {"SwapTotal", "SwapFree"} <= memory.keys():
        used = memory["SwapTotal"] - memory["SwapFree"]
        yield of.measured(used / 2**20, f"{gib(used)} in use" if used else "none in use")
    else:
        yield of.skipped(UNSEEN)
    of = rule("memory_huge_pages")
    if total:
        free = memory.get("HugePages_Free", 0) * memory.get("Hugepagesize", 0)
        yield of.measured(100 * free / total, f"{gib(free)} reserved and unused" if free else "none reserved")
    else:
        yield of.skipped(UNSEEN)
    yield _shm(source)
    yield _memory_errors(source)


def _memory(source: FactSource) -> dict[str, int]:
    """Parse /proc/meminfo into sizes in bytes, and numbers of pages, by name."""
    rows = re.findall(r"^(\S+):\s+(\d+)( kB)?", source.text("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in rows}


def _shm(source: FactSource) -> Finding:
    of = rule("memory_shm")
    try:
        status = source.statvfs(source.path("/dev/shm"))  # noqa: S108 (the kernel's own name)
    except OSError:
        return of.check("fail", "there is no /dev/shm")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return of.measured(free / 2**20, f"{gib(free)} of {gib(size)} free")


def _memory_errors(source: FactSource) -> Finding:
    of, folder = rule("memory_errors"), "/sys/devices/system/edac/mc"
    controllers = [name for name in source.names(folder) if re.fullmatch(r"mc\d+", name)]
    corrected = [source.number(f"{folder}/{name}/ce_count") for name in controllers]
    uncorrected = [source.number(f"{folder}/{name}/ue_count") for name in controllers]
    if all(count is None for count in (*corrected, *uncorrected)):
        return of.skipped(f"{UNSEEN}: no memory controller driver is loaded")
    mild, grave = (sum(count or 0 for count in counts) for counts in (corrected, uncorrected))
    text = f"{grave:,} uncorrected, {mild:,} corrected since boot"
    return of.check("fail", text, "uncorrected") if grave else of.measured(mild, text)


PASS_THROUGH = re.compile(r"(?:^|\s)(iommu=(?:pt|off)|iommu\.passthrough=1|(?:intel|amd)_iommu=off)(?:\s|$)")


def kernel_checks(source: FactSource) -> Iterator[Finding]:
    of, version = rule("kernel_version"), source.text("/proc/sys/kernel/osrelease")
    yield of.passed(version) if version else of.skipped(UNSEEN)
    of = rule("kernel_transparent_hugepage")
    pages = re.search(r"\[(\w+)\]", source.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    yield of.check("warn" if pages[1] == "never" else "pass", pages[1]) if pages else of.skipped(UNSEEN)
    yield _numa_balancing(source)
    yield _iommu(source)


def _numa_balancing(source: FactSource) -> Finding:
    of, balancing = rule("kernel_numa_balancing"), source.number("/proc/sys/kernel/numa_balancing")
    if balancing is None:
        return of.skipped(f"{UNSEEN}: this kernel does not support it")
    nodes = _numa_nodes(source)
    text = f"{'on' if balancing else 'off'}, {counted(nodes, 'NUMA node')}"
    return of.check("warn" if balancing and nodes > 1 else "pass", text)


def _iommu(source: FactSource) -> Finding:
    of, command_line = rule("kernel_iommu"), source.text("/proc/cmdline")
    if command_line is None:
        return of.skipped(UNSEEN)
    if chosen := PASS_THROUGH.search(command_line):
        return of.passed(chosen[1])
    groups = "/sys/kernel/iommu_groups"
    kinds = [kind for group in source.names(groups) if (kind := source.text(f"{groups}/{group}/type"))]
    if translated := sum(kind.startswith("DMA") for kind in kinds):
        return of.check("warn", f"translates the addresses of {counted(translated, 'device group')}")
    return of.passed("passes addresses through" if kinds else "off")


LIMITS: Mapping[str, int] = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
BYTES = ("memlock", "stack")
RAISED = "nofile"
"""The limit that ranks raise, so that the soft limit does not matter."""


def limit_checks(source: FactSource, *, has_rdma: bool) -> Iterator[Finding]:
    """Check the limits of this process, which in a job are the job's limits."""
    for name, number in LIMITS.items():
        of = rule(f"limits_{name}")
        if name == "memlock" and not has_rdma:
            yield of.skipped("only RDMA network cards need locked memory, and there is none")
            continue
        soft, hard = source.rlimit(number)
        if name == RAISED:
            yield of.check(_limit_status(name, hard), _shown(name, hard))
            continue
        status, hard_status = _limit_status(name, soft), _limit_status(name, hard)
        text = _shown(name, soft) + (f" (hard limit {_shown(name, hard)})" if status != "pass" else "")
        yield of.check(status, text, "hard" if hard_status != "pass" else "")
    yield _group_memory(source)


def _limit_status(name: str, limit: int) -> Status:
    if limit == resource.RLIM_INFINITY:
        return "pass"
    return rule(f"limits_{name}").thresholds.status(limit / 2**20 if name in BYTES else limit)


def _shown(name: str, limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return gib(limit) if name in BYTES else f"{limit:,}"


def _group_memory(source: FactSource) -> Finding:
    """Check the cgroup's memory limit, which in version 1 is a huge number if there is none."""
    of, total = rule("limits_memory"), _memory(source).get("MemTotal")
    if total is None:
        return of.skipped(UNSEEN)
    files = SystemFiles()
    names = ("memory.max", "memory.limit_in_bytes")
    limits = (files.number(str(group / name)) for group in cgroup_folders(source.root, "memory") for name in names)
    limit = min((limit for limit in limits if limit is not None), default=total)
    if limit >= total:
        return of.passed("all of the node")
    return of.measured(100 * limit / total, f"{gib(limit)} of {gib(total)}")


ROUNDS = 5
TICK_S = 0.01
"""Seconds by which timestamps of files may lag, because they are from the kernel's last tick."""
CLOCK_LIMIT_S = 10.0
LEAPS = ("Normal", "Insert second", "Delete second")
"""Leap status values of chrony for a synchronized clock."""
_OFFSET = re.compile(r"^System time\s*:\s*(\d+\.\d+) seconds (slow|fast) of NTP time", re.MULTILINE)
_LEAP = re.compile(r"^Leap status\s*:\s*(.+?)\s*$", re.MULTILINE)


class ClockReading(NamedTuple):
    """The seconds by which this clock is ahead of the clock that timestamps new files, and the maximum error in
    seconds."""

    ahead_s: float
    uncertainty_s: float


def read_shared_clock(folder: Path, name: str) -> ClockReading:
    """Create and remove a file several times, and return the most accurate reading; raise OSError if that fails."""
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
    """Compute a reading from a file's timestamp ``dated`` and this clock before and after its creation. Pure."""
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
    output = source.ask(["chronyc", "-n", "tracking"], CLOCK_LIMIT_S)
    leap, offset = _LEAP.search(output.text), _OFFSET.search(output.text)
    if output.problem is None and leap:
        if leap[1] not in LEAPS:
            return of.check("warn", "no (chrony)")
        if offset is None:
            return of.passed("yes (chrony)")
        side = "ahead" if offset[2] == "fast" else "behind"
        return of.measured(float(offset[1]), f"{float(offset[1]):.6f} s {side} (chrony)", "skewed")
    output = source.ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"], CLOCK_LIMIT_S)
    if output.problem is None and output.text.strip() in ("yes", "no"):
        fit = output.text.strip() == "yes"
        return of.check("pass" if fit else "warn", f"{output.text.strip()} (systemd)")
    return of.skipped(f"neither chronyc nor timedatectl answers ({output.problem or 'no output'})")

# SPDX-License-Identifier: Apache-2.0
"""Checks of the host: processors, memory, kernel, limits, clock, containers, and what the scheduler says of it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from llmb.health.checks.disk import is_shared
from llmb.health.checks.words import GIB, counted, gb, gib, listed
from llmb.health.facts.clock import ClockFacts
from llmb.health.facts.container import ContainerFacts
from llmb.health.facts.disk import DiskFacts
from llmb.health.facts.source import Missing
from llmb.health.facts.system import CpuFacts, KernelFacts, LimitFacts, MemoryFacts
from llmb.health.records import Status
from llmb.health.rules import Finding, names_of, rule, skipped
from llmb.health.wanted import WantedFacts
from llmb.schedulers.port import SchedulerSetup, Trait

CHECKED: tuple[Trait, ...] = ("tracking", "binding", "selection", "gpus", "mpi", "containers")


class Silent(NamedTuple):
    """A scheduler that should answer here, and does not."""

    reason: str


def scheduler_checks(
    setup: SchedulerSetup | Silent | Missing, title: str, gpus: int, wanted: WantedFacts
) -> Iterator[Finding]:
    """``gpus`` are those that this node shows."""
    if isinstance(setup, Missing):
        yield from skipped(names_of("scheduler"), setup.reason)
        return
    of = rule("scheduler_answer")
    if isinstance(setup, Silent):
        yield of.found("warn", setup.reason)
        yield from skipped([name for name in names_of("scheduler") if name != of.name], f"{title} does not answer")
        return
    yield of.passed("yes")
    of = rule("scheduler_version")
    yield of.passed(f"{title} {setup.version}") if setup.version else of.skipped(f"{title} does not show it")
    yield from _node(setup, title, gpus)
    for trait in CHECKED:
        yield _trait(trait, setup, wanted)


def _trait(trait: Trait, setup: SchedulerSetup, wanted: WantedFacts) -> Finding:
    of = rule(f"scheduler_{trait}")
    plugin = setup.traits.get(trait)
    if plugin is None:
        return of.skipped("its commands do not show it")
    if plugin.fit:
        return of.passed(plugin.value)
    if trait == "gpus" and not wanted.needs_gpus:
        return of.skipped(f"{plugin.value}, and no GPU is expected")
    if trait == "containers":
        asked = wanted.runtime == "pyxis"
        return of.found("fail", plugin.value) if asked else of.skipped(f"{plugin.value}, and none is requested")
    return of.found("warn", plugin.value)


def _node(setup: SchedulerSetup, title: str, gpus: int) -> Iterator[Finding]:
    of = rule("scheduler_node")
    if setup.node is None:
        yield of.skipped(f"this machine is not a node of {title}, such as a login node")
        yield rule("scheduler_node_gpus").skipped(f"this machine is not a node of {title}")
        return
    reason = f": {setup.node.reason}" if setup.node.reason and not setup.node.usable else ""
    yield of.found("pass" if setup.node.usable else "fail", f"{setup.node.state}{reason}")
    of = rule("scheduler_node_gpus")
    if setup.node.gpus is None:
        yield of.skipped(f"{title} counts no GPUs of this node")
    else:
        text = f"{setup.node.gpus} in {title}, {gpus} here"
        yield of.found("pass" if setup.node.gpus == gpus else "fail", text)


PROGRAMS = {"pyxis": ("enroot",), "apptainer": ("apptainer", "singularity")}
"""A runtime of cluster_config.yaml needs one of its programs."""


def container_checks(facts: ContainerFacts, wanted: WantedFacts) -> Iterator[Finding]:
    of = rule("container_runtime")
    shown = listed(f"{name} {version}" for name, version in facts.versions.items())
    needed = PROGRAMS.get(wanted.runtime, ())
    if needed and not set(needed) & facts.versions.keys():
        has = f"; only {shown}" if shown else ""
        yield of.found("fail", f"no {needed[0]}{has}; cluster_config.yaml has runtime: {wanted.runtime}")
    elif facts.versions:
        yield of.passed(shown)
    else:
        yield of.skipped("no runtime of containers is installed, and none is requested")
    yield _enroot(facts)


def _enroot(facts: ContainerFacts) -> Finding:
    of = rule("container_enroot_folders")
    if isinstance(facts.enroot, Missing):
        return of.skipped(facts.enroot.reason)
    known = [folder for folder in facts.enroot if folder.path]
    if not known:
        return of.skipped("its settings cannot be read without a shell")
    seen = [(folder, folder.disk) for folder in known if not isinstance(folder.disk, Missing)]
    hung = [f"{one.setting} {one.path}: {one.disk.reason}" for one in known if isinstance(one.disk, Missing)]
    if hung:
        return of.found("fail", listed(hung), "closed")
    closed = [f"{folder.setting} {folder.path}" for folder, disk in seen if not disk.writable]
    if closed:
        return of.found("fail", f"not writable: {listed(closed)}", "closed")
    least, disk = min(seen, key=lambda pair: pair[1].free)
    return of.measured(disk.free / 1e9, f"at least {gb(disk.free)} free ({least.setting} {least.path})")


def clock_checks(facts: ClockFacts | Missing, install: DiskFacts | Missing) -> Iterator[Finding]:
    of = rule("clock_synchronized")
    if isinstance(facts, Missing):
        yield of.skipped(facts.reason)
    elif not facts.synchronized:
        yield of.found("warn", f"no ({facts.by})")
    elif facts.ahead_s is None:
        yield of.passed(f"yes ({facts.by})")
    else:
        side = "ahead" if facts.ahead_s > 0 else "behind"
        yield of.measured(abs(facts.ahead_s), f"{abs(facts.ahead_s):.6f} s {side} ({facts.by})", "skewed")
    yield _file_clock(install)


def _file_clock(install: DiskFacts | Missing) -> Finding:
    """A file server dates files by its own clock, which all nodes have in common."""
    of = rule("clock_file_server")
    if isinstance(install, Missing):
        return of.skipped(f"no file was written: {install.reason}")
    if isinstance(install.rates, Missing):
        return of.skipped(f"no file was written: {install.rates.reason}")
    if not is_shared(install.mount):
        return of.skipped("the root of installation is on a local disk")
    ahead_s = install.rates.clock_ahead_s
    side = "ahead of" if ahead_s > 0 else "behind"
    return of.measured(abs(ahead_s), f"{abs(ahead_s):.3f} s {side} the file server")


UNSEEN = "Linux does not show it here"
PASS_THROUGH = re.compile(r"(?:^|\s)(iommu=(?:pt|off)|iommu\.passthrough=1|(?:intel|amd)_iommu=off)(?:\s|$)")
BYTES = ("memlock", "stack")


def cpu_checks(facts: CpuFacts, wanted: WantedFacts) -> Iterator[Finding]:
    yield _governor(facts)
    of = rule("cpu_idle_states")
    if facts.deepest_state is None:
        yield of.skipped(f"{UNSEEN}, as in most virtual machines")
    else:
        name, microseconds = facts.deepest_state
        yield of.measured(microseconds, f"{name}, {microseconds} µs to leave")
    yield _numa(facts)
    of = rule("cpu_threads")
    if facts.threads_per_core is None:
        yield of.skipped(UNSEEN)
    else:
        yield of.passed(f"{facts.threads_per_core} per core")
    yield _cores(facts, wanted)
    of = rule("cpu_load")
    if facts.load is None or not facts.online:
        yield of.skipped(UNSEEN)
    else:
        yield of.measured(
            100 * facts.load / facts.online, f"{facts.load:g} processes on {counted(facts.online, 'CPU')}"
        )


def _governor(facts: CpuFacts) -> Finding:
    of = rule("cpu_governor")
    if not facts.governors:
        return of.skipped(f"{UNSEEN}, as in most virtual machines")
    if facts.preference == "performance" or set(facts.governors) == {"performance"}:
        return of.passed("performance")
    others = {name: count for name, count in facts.governors.items() if name != "performance"}
    return of.found("warn", listed(f"{name} on {counted(count, 'CPU')}" for name, count in others.items()))


def _numa(facts: CpuFacts) -> Finding:
    of = rule("cpu_numa")
    if not facts.numa_nodes:
        return of.skipped(UNSEEN)
    text = counted(facts.numa_nodes, "NUMA node")
    if facts.gpus_without_node:
        return of.found("warn", f"{text}; {counted(facts.gpus_without_node, 'device')} of NVIDIA on none of them")
    return of.passed(text)


def _cores(facts: CpuFacts, wanted: WantedFacts) -> Finding:
    of = rule("cpu_allowed")
    online = facts.online or facts.allowed
    text = f"{facts.allowed:g} of {counted(int(online), 'CPU')}"
    if not wanted.gpus:
        return of.passed(text)
    return of.measured(facts.allowed / wanted.gpus, f"{text}, for {counted(wanted.gpus, 'GPU')}")


def memory_checks(facts: MemoryFacts) -> Iterator[Finding]:
    of = rule("memory_size_gib")
    yield of.passed(round(facts.total / GIB)) if facts.total else of.skipped(UNSEEN)
    of = rule("memory_available")
    if facts.total and facts.available is not None:
        yield of.measured(
            100 * facts.available / facts.total, f"{gib(facts.available)} of {gib(facts.total)} available"
        )
    else:
        yield of.skipped(UNSEEN)
    of = rule("memory_swap")
    yield (
        of.skipped(UNSEEN)
        if facts.swap_used is None
        else of.measured(
            facts.swap_used / 2**20, f"{gib(facts.swap_used)} in use" if facts.swap_used else "none in use"
        )
    )
    of = rule("memory_huge_pages")
    if facts.total:
        text = f"{gib(facts.huge_pages)} reserved and unused" if facts.huge_pages else "none reserved"
        yield of.measured(100 * facts.huge_pages / facts.total, text)
    else:
        yield of.skipped(UNSEEN)
    of = rule("memory_shm")
    if facts.shm_size is None or facts.shm_free is None:
        yield of.found("fail", "there is no /dev/shm")
    else:
        yield of.measured(facts.shm_free / 2**20, f"{gib(facts.shm_free)} of {gib(facts.shm_size)} free")
    yield _memory_errors(facts)


def _memory_errors(facts: MemoryFacts) -> Finding:
    of = rule("memory_errors")
    if facts.corrected is None and facts.uncorrected is None:
        return of.skipped(f"{UNSEEN}: no driver of a memory controller is loaded")
    text = f"{facts.uncorrected or 0:,} uncorrected, {facts.corrected or 0:,} corrected since the boot"
    if facts.uncorrected:
        return of.found("fail", text, "uncorrected")
    return of.measured(facts.corrected or 0, text)


def kernel_checks(facts: KernelFacts) -> Iterator[Finding]:
    of = rule("kernel_version")
    yield of.passed(facts.version) if facts.version else of.skipped(UNSEEN)
    of = rule("kernel_transparent_hugepage")
    pages = facts.transparent_hugepage
    yield of.skipped(UNSEEN) if pages is None else of.found("warn" if pages == "never" else "pass", pages)
    of = rule("kernel_numa_balancing")
    if facts.numa_balancing is None:
        yield of.skipped(f"{UNSEEN}: this kernel has none")
    else:
        moves = facts.numa_balancing != 0 and facts.numa_nodes > 1
        on = "on" if facts.numa_balancing else "off"
        yield of.found("warn" if moves else "pass", f"{on}, {counted(facts.numa_nodes, 'NUMA node')}")
    yield _iommu(facts)


def _iommu(facts: KernelFacts) -> Finding:
    of = rule("kernel_iommu")
    if facts.command_line is None:
        return of.skipped(UNSEEN)
    if chosen := PASS_THROUGH.search(facts.command_line):
        return of.passed(chosen[1])
    translated = sum(count for kind, count in facts.iommu_types.items() if kind.startswith("DMA"))
    if translated:
        return of.found("warn", f"translates the addresses of {counted(translated, 'group')} of devices")
    return of.passed("passes addresses through" if facts.iommu_types else "off")


def limit_checks(facts: LimitFacts, *, has_rdma: bool) -> Iterator[Finding]:
    for name, (soft, hard) in facts.limits.items():
        of = rule(f"limits_{name}")
        if name == "memlock" and not has_rdma:
            yield of.skipped("only network cards with RDMA need locked memory, and there is none")
            continue
        status: Status = "pass" if soft is None else of.thresholds.status(_figure(name, soft))
        hardly = "hard" if hard is not None and of.thresholds.status(_figure(name, hard)) != "pass" else ""
        shown = _shown(name, soft) + (f" (hard limit {_shown(name, hard)})" if status != "pass" else "")
        yield of.found(status, shown, hardly)
    yield _group_memory(facts)


def _group_memory(facts: LimitFacts) -> Finding:
    """Version 1 shows a huge number where there is no limit."""
    of = rule("limits_memory")
    if facts.total is None:
        return of.skipped(UNSEEN)
    if facts.memory is None or facts.memory >= facts.total:
        return of.passed("all of the node")
    return of.measured(100 * facts.memory / facts.total, f"{gib(facts.memory)} of {gib(facts.total)}")


def _figure(name: str, limit: int) -> float:
    return limit / 2**20 if name in BYTES else limit


def _shown(name: str, limit: int | None) -> str:
    return "unlimited" if limit is None else gib(limit) if name in BYTES else f"{limit:,}"

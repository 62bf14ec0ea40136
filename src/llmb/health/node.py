# SPDX-License-Identifier: Apache-2.0
"""All checks of this node."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from llmb.errors import EnvironmentProblem, InfrastructureError
from llmb.health.checks.disk import disk_checks
from llmb.health.checks.gpus import gpu_checks
from llmb.health.checks.network import network_checks
from llmb.health.checks.software import software_checks
from llmb.health.checks.system import (
    Silent,
    clock_checks,
    container_checks,
    cpu_checks,
    kernel_checks,
    limit_checks,
    memory_checks,
    scheduler_checks,
)
from llmb.health.facts.clock import read_clock
from llmb.health.facts.container import read_containers
from llmb.health.facts.disk import DiskFacts, read_disk
from llmb.health.facts.gpus import GpuFacts, read_gpus
from llmb.health.facts.network import NetworkFacts, read_network
from llmb.health.facts.software import read_software
from llmb.health.facts.source import FactSource, Missing
from llmb.health.facts.system import read_cpu, read_kernel, read_limits, read_memory
from llmb.health.records import Check, NodeReport, NotChecked, worst
from llmb.health.rules import AREAS, Area, Finding, names_of, rule_of, skipped
from llmb.health.wanted import WantedFacts
from llmb.runs.host import host_name
from llmb.schedulers.port import Scheduler, SchedulerSetup

DISK_BYTES = 256 * 2**20
CLOCK_BYTES = 2**20
SCHEDULER_S = 20.0
Say = Callable[[str], None]
TITLES: dict[Area, str] = {
    "gpu": "GPUs",
    "cpu": "CPUs",
    "memory": "memory",
    "kernel": "kernel",
    "limits": "limits",
    "network": "network",
    "scheduler": "scheduler",
    "container": "containers",
    "disk": "file systems",
    "software": "software",
    "clock": "clock",
    "nodes": "nodes beside each other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What to check; ``only`` has names of areas and of checks, and all are checked if it is empty."""

    wanted: WantedFacts
    scheduler: Scheduler
    places: Mapping[str, Path]
    """Folders that runs write to, by what they are for; the first is the root of installation."""
    python: str
    """The interpreter that trains."""
    disk_bytes: int = DISK_BYTES
    """Size of the file that is written and read in each file system; 0 for none."""
    only: Collection[str] = ()

    def areas(self) -> list[Area]:
        return [area for area in AREAS if not self.only or {area, *names_of(area)} & {*self.only}]

    def asks_for(self, name: str) -> bool:
        """Whether a check of this name is asked for."""
        of = rule_of(name)
        return not self.only or bool({of.name, of.area} & {*self.only})


def check_node(request: CheckRequest, source: FactSource | None = None, say: Say = lambda _: None) -> NodeReport:
    """Reads and judges all that ``request`` asks for, and never raises for what is missing or broken here.

    ``say`` is called with each area before it is read, because some take a minute.
    """
    node = Node(request, source or FactSource(), say)
    findings: list[Finding] = []
    for area in request.areas():
        say(TITLES[area])
        try:
            findings += node.findings(area)
        except OSError as error:
            findings += skipped(names_of(area), f"it cannot be read: {error}")
    kept = [finding for finding in findings if request.asks_for(finding.name)]
    checks = tuple(finding for finding in kept if isinstance(finding, Check))
    return NodeReport(
        node=node.name,
        checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        status=worst(check.status for check in checks),
        checks=checks,
        not_checked=tuple(finding for finding in kept if isinstance(finding, NotChecked)),
    )


class Node:
    """Facts of this node, read when they are first needed: several areas need the number of GPUs."""

    def __init__(self, request: CheckRequest, source: FactSource, say: Say) -> None:
        self.request, self.source, self.say = request, source, say
        self.name = host_name()

    @cached_property
    def gpus(self) -> GpuFacts:
        return read_gpus(self.source, self.name)

    @property
    def gpu_count(self) -> int:
        return 0 if isinstance(self.gpus.states, Missing) else len(self.gpus.states.gpus)

    @cached_property
    def network(self) -> NetworkFacts:
        return read_network(self.source, self.name)

    @cached_property
    def disks(self) -> dict[str, DiskFacts | Missing]:
        """A file system that several places are on is measured once."""
        found: dict[str, DiskFacts | Missing] = {}
        measured: set[int] = set()
        for place, folder in self.request.places.items():
            self.say(f"{TITLES['disk']}: {folder}")
            facts = read_disk(self.source, folder, 0)
            size = self.request.disk_bytes
            if size and not isinstance(facts, Missing) and facts.writable and facts.device not in measured:
                measured.add(facts.device)
                facts = read_disk(self.source, folder, min(size, facts.free // 2))
            found[place] = facts
        return found

    def findings(self, area: Area) -> Iterable[Finding]:
        wanted = self.request.wanted
        checks: dict[Area, Callable[[], Iterable[Finding]]] = {
            "gpu": lambda: gpu_checks(self.gpus, wanted),
            "cpu": lambda: cpu_checks(read_cpu(self.source), wanted),
            "memory": lambda: memory_checks(read_memory(self.source)),
            "kernel": lambda: kernel_checks(read_kernel(self.source)),
            "limits": lambda: limit_checks(read_limits(self.source), has_rdma=bool(self.network.ports)),
            "network": lambda: network_checks(self.network, self.gpu_count, wanted),
            "scheduler": self._scheduler,
            "container": lambda: container_checks(read_containers(self.source), wanted),
            "disk": lambda: disk_checks(self.disks, wanted, self.gpu_count),
            "software": self._software,
            "clock": lambda: clock_checks(read_clock(self.source), self._install()),
        }
        return checks[area]()

    def _scheduler(self) -> Iterable[Finding]:
        title = self.request.scheduler.title
        return scheduler_checks(self._setup(), title, self.gpu_count, self.request.wanted)

    def _software(self) -> Iterable[Finding]:
        facts = read_software(self.source, self.request.python)
        return software_checks(facts, self.request.python, self.gpu_count, self.request.wanted)

    def _install(self) -> DiskFacts | Missing:
        """The clock needs no more than a new file."""
        if "disk" in self.request.areas():
            return next(iter(self.disks.values()), Missing("no folder"))
        folder = next(iter(self.request.places.values()), None)
        return (
            read_disk(self.source, folder, min(CLOCK_BYTES, self.request.disk_bytes))
            if folder
            else Missing("no folder")
        )

    def _setup(self) -> SchedulerSetup | Silent | Missing:
        try:
            return self.request.scheduler.setup(self.name, SCHEDULER_S)
        except EnvironmentProblem as error:
            return Missing(error.what)
        except InfrastructureError as error:
            return Silent(error.what)

# SPDX-License-Identifier: Apache-2.0
"""Runs the requested checks of this node, or reads its settings.

``python -m llmb.nodes.doctor.node FOLDER NODE`` writes this node's report, or its settings and an empty report, into
the folder of a check of several nodes, independently of the other nodes.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, InfrastructureError, LlmbError
from llmb.base.missing import Missing
from llmb.catalogue.catalogue import Catalogue
from llmb.launch.scheduler_lookup import read_cluster_site, scheduler_of
from llmb.launch.scheduler_port import Scheduler, SchedulerSetup
from llmb.nodes.doctor.check_records import Check, CheckOptions, NodeReport, NotChecked, worst
from llmb.nodes.doctor.checked_nodes import CheckFolder
from llmb.nodes.doctor.checks.disk import NOT_MEASURED, DiskFacts, disk_checks, read_disk
from llmb.nodes.doctor.checks.gpus import gpu_checks
from llmb.nodes.doctor.checks.host import (
    ClockReading,
    clock_checks,
    cpu_checks,
    kernel_checks,
    limit_checks,
    memory_checks,
    read_shared_clock,
)
from llmb.nodes.doctor.checks.network import Port, network_checks, read_ports
from llmb.nodes.doctor.checks.nvidia_smi import GpuFacts, read_gpus, read_states
from llmb.nodes.doctor.checks.software import Silent, container_checks, scheduler_checks, software_checks
from llmb.nodes.doctor.facts import FactSource, TargetFacts, run_places, target_of
from llmb.nodes.doctor.rules import AREAS, TITLES, Area, Finding, names_of, rule_of, skipped
from llmb.readers.samples.host import host_name
from llmb.readers.samples.node_settings import NodeSettings, read_settings
from llmb.runs.conditions import gpu_limits
from llmb.runs.folder import write_atomically
from llmb.runs.record import now

DISK_BYTES = 256 * 2**20
SCHEDULER_S = 20.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """The request to check this node, with expectations from options and the cluster's settings."""

    options: CheckOptions
    target: TargetFacts
    scheduler: Scheduler
    places: Mapping[str, Path]
    """Folders that runs use, by purpose; the first is the install root."""
    python: str
    """The interpreter with which runs train."""

    def asks_for(self, *names: str) -> bool:
        return not self.options.only or not {*names}.isdisjoint(self.options.only)


def check_request(install: Path, options: CheckOptions, environ: Mapping[str, str]) -> CheckRequest:
    """Return the request; raise UsageError if settings or the GPU type are invalid."""
    catalogue = Catalogue()
    site = read_cluster_site(catalogue, install, environ)
    return CheckRequest(
        options=options,
        target=target_of(catalogue, site, options.gpu_type, options.gpus),
        scheduler=scheduler_of(site),
        places=run_places(site, environ),
        python=site.config.python or sys.executable,
    )


def check_node(request: CheckRequest, say: Say = lambda _: None) -> NodeReport:
    """Run the requested checks; missing or broken parts of the node do not raise errors.

    ``say`` is called before each area, and each folder whose disk is checked, because some of these take a minute.
    """
    node = Node(request, FactSource(), say)
    findings: list[Finding] = []
    for area in AREAS:
        if not request.asks_for(area, *names_of(area)):
            continue
        say(TITLES[area])
        try:
            findings += node.findings(area)
        except OSError as error:
            findings += skipped(names_of(area), f"the facts cannot be read: {error}")
    selected = [item for item in findings if request.asks_for(rule_of(item.name).name, rule_of(item.name).area)]
    checks = tuple(finding for finding in selected if isinstance(finding, Check))
    return NodeReport(
        node=node.name,
        checked_at=now(),
        status=worst(check.status for check in checks),
        checks=checks,
        not_checked=tuple(finding for finding in selected if isinstance(finding, NotChecked)),
    )


class Node:
    """The facts about this node, which are read once, when first needed, because several areas use the same facts."""

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
    def ports(self) -> list[Port]:
        return read_ports(self.source)

    @cached_property
    def disks(self) -> dict[str, DiskFacts | Missing]:
        """Read the disks by place; the rates of a file system with several places are measured once."""
        by_path: dict[str, DiskFacts | Missing] = {}
        measured: set[int] = set()
        for place, folder in self.request.places.items():
            self.say(f"{TITLES['disk']}: {folder}")
            facts = read_disk(self.source, folder, 0)
            size = self.request.options.disk_bytes
            if size and not isinstance(facts, Missing) and facts.writable and facts.device not in measured:
                measured.add(facts.device)
                facts = read_disk(self.source, folder, min(size, facts.free // 2))
            by_path[place] = facts
        return by_path

    def findings(self, area: Area) -> Iterable[Finding]:
        source, target = self.source, self.request.target
        checks: dict[Area, Callable[[], Iterable[Finding]]] = {
            "gpu": lambda: gpu_checks(self.gpus, target),
            "cpu": lambda: cpu_checks(source, target),
            "memory": lambda: memory_checks(source),
            "kernel": lambda: kernel_checks(source),
            "limits": lambda: limit_checks(source, has_rdma=bool(self.ports)),
            "network": lambda: network_checks(source, self.ports, self.name, self.gpu_count, target),
            "scheduler": lambda: scheduler_checks(self._setup(), self.request.scheduler.title, self.gpu_count, target),
            "container": lambda: container_checks(source, target),
            "disk": lambda: disk_checks(self.disks, target, self.gpu_count),
            "software": lambda: software_checks(source, self.request.python, self.gpu_count, target),
            "clock": lambda: clock_checks(source, self._file_server_clock()),
        }
        return checks[area]()

    def _file_server_clock(self) -> ClockReading | Missing:
        """Compare this node's clock with the clock that timestamps files in the install root, which all nodes share."""
        install = read_disk(self.source, next(iter(self.request.places.values())), 0)
        if isinstance(install, Missing):
            return install
        if not (install.mount and install.mount.shared):
            return Missing("the install root is on a local disk")
        if not self.request.options.disk_bytes:
            return NOT_MEASURED
        try:
            return read_shared_clock(Path(install.path), f".llmb-clock-{self.name}")
        except OSError as error:
            return Missing(f"no file can be written to the install root: {error.strerror}")

    def _setup(self) -> SchedulerSetup | Silent | Missing:
        try:
            return self.request.scheduler.setup(self.name, SCHEDULER_S)
        except EnvironmentProblem as error:
            return Missing(error.what)
        except InfrastructureError as error:
            return Silent(error.what)


def checked(folder: CheckFolder, node: str, environ: Mapping[str, str]) -> NodeReport:
    """Check this node, or only save its settings, as the folder's request specifies, and return the report.

    Raises UsageError, OSError or BrokenRecord if settings or the request are invalid, or cannot be read or written."""
    install, request = Path(environ["LLMB_INSTALL"]), folder.read_request()
    if request.settings:
        read = settings_here(install, environ)
        write_atomically(folder.settings(node), read.model_dump_json(indent=2) + "\n")
        return NodeReport(node=node, checked_at=now(), status="pass", checks=())
    report = check_node(check_request(install, request, environ))
    clock: dict[str, float] = {}
    with suppress(OSError):  # if the folder cannot be written, writing the report fails, too
        ahead_s, unsure_s = read_shared_clock(folder.path, f".clock-{node}")
        clock = {"clock_ahead_s": ahead_s, "clock_uncertainty_s": unsure_s}
    return report.model_copy(update={"node": node, **clock})


def main(path: str, node: str) -> int:
    folder = CheckFolder(Path(path))
    try:
        report = checked(folder, node, os.environ)
        write_atomically(folder.report(node), report.model_dump_json(indent=2) + "\n")
    except LlmbError as error:
        sys.stderr.write(f"{error.what}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error.filename or path}: {error.strerror}\n")
        return 1
    return 0


def settings_here(install: Path, environ: Mapping[str, str], source: FactSource | None = None) -> NodeSettings:
    """Return this node's settings, GPU limits and job image; raise UsageError if llmb's settings are invalid."""
    source = source or FactSource(environ=environ)
    settings = read_settings(source, environ)
    states, _ = read_states(source, host_name())
    site = read_cluster_site(Catalogue(), install, environ)
    container = site.config.container
    image = {"software.image": container.image} if container.image and container.runtime != "none" else {}
    limits = {} if isinstance(states, Missing) else gpu_limits(states.gpus)
    missing = {"hardware": states.reason} if isinstance(states, Missing) else {}
    return NodeSettings(values={**settings.values, **limits, **image}, missing={**settings.missing, **missing})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))

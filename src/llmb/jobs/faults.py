# SPDX-License-Identifier: Apache-2.0
"""Whether the infrastructure made a job fail, and which nodes are at fault. Pure, except for reading its table."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.runs.failure import failed_host
from llmb.schedulers.port import INFRASTRUCTURE, FaultPattern, Phase, Scheduler

TABLE = Path(__file__).parent / "data" / "faults.yaml"


class FaultTable(Record):
    """The whole file."""

    faults: tuple[FaultPattern, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """The cause of a job's failure. ``nodes`` are those at fault, as far as they are known."""

    name: str
    infrastructure: bool
    meaning: str
    nodes: tuple[str, ...] = ()


def read_faults(path: Path = TABLE) -> FaultTable:
    """The patterns for every log. Raises CatalogueError for a file that violates its schema."""
    return read_file(path, FaultTable)


@cache
def faults_of(scheduler: Scheduler) -> FaultTable:
    """The patterns for every log, and those of the scheduler's own messages."""
    return FaultTable(faults=(*read_faults().faults, *scheduler.fault_patterns()))


def find_fault(table: FaultTable, phase: Phase, log: str) -> Fault | None:
    """The cause of the end ``phase`` of a job whose log ends with ``log``; None if it is unknown.

    The scheduler's state takes precedence: messages of processes that die with their node are misleading. A node that
    the scheduler found dead is already down, so it is not listed. A run without a known cause is not retried.
    """
    if phase in INFRASTRUCTURE:
        return Fault(phase, infrastructure=True, meaning=MEANINGS[phase])
    if phase == "out_of_memory":
        return Fault("host_out_of_memory", infrastructure=False, meaning="a node ran out of host memory")
    if phase != "failed":
        return None
    for entry in table.faults:
        match = re.search(entry.pattern, log, re.IGNORECASE)
        if match:
            infrastructure = entry.kind == "infrastructure"
            return Fault(entry.fault, infrastructure, entry.meaning, _nodes(match, log) if infrastructure else ())
    return None


def worth_a_retry(table: FaultTable, fault: str | None) -> bool:
    """Whether ``fault`` is a fault of the infrastructure."""
    if fault in INFRASTRUCTURE:
        return True
    return any(entry.fault == fault and entry.kind == "infrastructure" for entry in table.faults)


MEANINGS = {
    "node_fail": "a node failed",
    "preempted": "a job of higher priority took the nodes",
    "boot_fail": "a node could not be booted",
}


def _nodes(match: re.Match[str], log: str) -> tuple[str, ...]:
    """The nodes that the line names; without any, the node of the rank that failed first."""
    named = [text for name, text in match.groupdict().items() if text]
    host = failed_host(log)
    return tuple(named) or ((host,) if host else ())

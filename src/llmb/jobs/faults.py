# SPDX-License-Identifier: Apache-2.0
"""Whether a job failed through no fault of its own, and which nodes are to blame. Pure, but for its table."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.jobs.states import INFRASTRUCTURE
from llmb.runs.failure import failed_host

TABLE = Path(__file__).parent / "data" / "faults.yaml"


class FaultPattern(Record):
    """One entry of the table."""

    fault: str
    kind: Literal["own", "infrastructure"]
    pattern: str
    meaning: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return value


class FaultTable(Record):
    """The whole file."""

    faults: tuple[FaultPattern, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a job. ``nodes`` are those at fault, as far as they are known."""

    name: str
    infrastructure: bool
    meaning: str
    nodes: tuple[str, ...] = ()


def read_faults(path: Path = TABLE) -> FaultTable:
    """Raises CatalogueError for a file that breaks its schema."""
    return read_file(path, FaultTable)


def find_fault(table: FaultTable, state: str, log: str) -> Fault | None:
    """The cause of the end ``state`` of a job whose log ends with ``log``; null where nobody knows.

    Slurm's own word goes first: what processes say that die with their node is of no use. A node that Slurm found dead
    is down, and needs no naming. A run without a known cause is not tried again.
    """
    if state in INFRASTRUCTURE:
        return Fault(state.lower(), infrastructure=True, meaning=STATES[state])
    if state == "OUT_OF_MEMORY":
        return Fault("host_out_of_memory", infrastructure=False, meaning="a node's memory does not hold the run")
    if state != "FAILED":
        return None
    for entry in table.faults:
        found = re.search(entry.pattern, log, re.IGNORECASE)
        if found:
            infrastructure = entry.kind == "infrastructure"
            return Fault(entry.fault, infrastructure, entry.meaning, _nodes(found, log) if infrastructure else ())
    return None


def worth_a_retry(table: FaultTable, fault: str | None) -> bool:
    """Whether what a job failed by is none of its own doing."""
    if fault and fault.upper() in INFRASTRUCTURE:
        return True
    return any(entry.fault == fault and entry.kind == "infrastructure" for entry in table.faults)


STATES = {
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "a job of higher priority took the nodes",
    "BOOT_FAIL": "a node could not be booted",
}


def _nodes(found: re.Match[str], log: str) -> tuple[str, ...]:
    """The nodes that the line itself names, else the one of the rank that failed first."""
    named = [text for name, text in found.groupdict().items() if text]
    host = failed_host(log)
    return tuple(named) or ((host,) if host else ())

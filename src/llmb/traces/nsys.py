# SPDX-License-Identifier: Apache-2.0
"""Reads SQLite exports of Nsight Systems (``nsys export --type sqlite``).

Tables and columns: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference. Times are in
nanoseconds. The tables and columns of an export depend on its version and on what was traced.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmb.errors import UsageError
from llmb.traces.chrome import STEP_NAME, device_steps, rank_in_name
from llmb.traces.classify import MEMORY_COPY, Rules
from llmb.traces.timeline import Recorder, Timeline, make_timeline

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
NO_THREAD = ~0xFFFFFF
"""The lowest 24 bits of ``globalTid`` are the thread; without them it is the ``globalPid`` of GPU activities."""
Steps = dict[int, tuple[int, int]]


def read_nsys(path: Path, rules: Rules) -> list[Timeline]:
    """One timeline per process, in the order of their identifiers; kernels count for their own process.

    Raises UsageError if the file is not an export, or has no GPU kernels. A process without steps gives a timeline
    without steps.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return list(_timelines(_Export(path, connection), rules))
    except sqlite3.Error as error:
        raise _unreadable(path, f"is not an SQLite database that can be read: {error}") from error


@dataclass(slots=True)
class _Export:
    path: Path
    connection: sqlite3.Connection

    def columns(self, table: str) -> set[str]:
        """Empty if there is no such table."""
        return {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}

    def processes(self) -> list[int | None]:
        """Processes that used a GPU; a single unknown one if the export does not distinguish processes."""
        if "globalPid" not in self.columns(KERNELS):
            return [None]
        query = f"SELECT DISTINCT globalPid FROM {KERNELS} ORDER BY globalPid"  # noqa: S608 (a name of this module)
        return [row[0] for row in self.connection.execute(query)]

    def steps(self, process: int | None) -> Steps:
        """The ranges on the host that are named after steps."""
        columns = self.columns(RANGES)
        text = "COALESCE(r.text, s.value)" if "text" in columns else "s.value"
        name_of = "LEFT JOIN StringIds s ON s.id = r.textId" if "textId" in columns else ""
        if not name_of:
            text = "r.text"
        query = f"SELECT r.start, r.end, r.globalTid, {text} FROM {RANGES} r {name_of} WHERE r.end IS NOT NULL"  # noqa: S608
        found: Steps = {}
        for start, end, thread, name in self.connection.execute(query) if columns else ():
            match = STEP_NAME.fullmatch(name or "")
            if match and process in (None, thread & NO_THREAD):
                found[int(match[1])] = (start, end)
        return found

    def done(self, step: tuple[int, int], process: int | None) -> int | None:
        """When the GPU finished the kernels that were launched in ``step``; None if there are none."""
        if not self.columns(LAUNCHES):
            return None
        own = "" if process is None else "AND k.globalPid = :process AND (l.globalTid & :mask) = :process"
        query = f"""SELECT MAX(k.end) FROM {LAUNCHES} l JOIN {KERNELS} k ON k.correlationId = l.correlationId
            WHERE l.start >= :start AND l.start < :end {own}"""  # noqa: S608
        values = {"start": step[0], "end": step[1], "process": process, "mask": NO_THREAD}
        end: int | None = self.connection.execute(query, values).fetchone()[0]
        return end

    def kernels(self, process: int | None) -> Iterator[tuple[int, int, str]]:
        name = "demangledName" if "demangledName" in self.columns(KERNELS) else "shortName"
        query = f"SELECT k.start, k.end, s.value FROM {KERNELS} k JOIN StringIds s ON s.id = k.{name}"  # noqa: S608
        if process is not None:
            query += " WHERE k.globalPid = :process"
        yield from self.connection.execute(query, {"process": process})

    def copies(self, process: int | None) -> Iterator[tuple[int, int, str]]:
        for table in COPIES:
            columns = self.columns(table)
            query = f"SELECT start, end FROM {table}"  # noqa: S608
            if process is not None and "globalPid" in columns:
                query += " WHERE globalPid = :process"
            for start, end in self.connection.execute(query, {"process": process}) if columns else ():
                yield start, end, table.rpartition("_")[2].capitalize()


def _timelines(export: _Export, rules: Rules) -> Iterator[Timeline]:
    if not export.columns("StringIds") or not export.columns(KERNELS):
        raise _unreadable(export.path, f"has no GPU kernels (table {KERNELS})")
    processes = export.processes()
    for process in processes:
        recorder = Recorder()
        for start, end, name in export.kernels(process):
            recorder.add(start, end, name, rules.kernel(name))
        for start, end, name in export.copies(process):
            recorder.add(start, end, name, MEMORY_COPY)
        host = export.steps(process)
        ends = {number: export.done(span, process) for number, span in host.items()}
        steps = device_steps(host, {number: end for number, end in ends.items() if end is not None})
        rank = rank_in_name(export.path) if len(processes) == 1 else None
        source = export.path.name if len(processes) == 1 else f"{export.path.name} process {(process or 0) >> 24}"
        yield make_timeline(source, rank, "gpu", steps, [recorder])


def _unreadable(path: Path, what: str) -> UsageError:
    return UsageError(
        f"not a trace: the file {what}",
        where=str(path),
        do="export a report with 'nsys export --type sqlite REPORT.nsys-rep'; trace at least 'cuda,nvtx'",
    )

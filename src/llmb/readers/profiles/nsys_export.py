# SPDX-License-Identifier: Apache-2.0
"""Reads SQLite exports of Nsight Systems, whose times are in nanoseconds.

Schema: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeGuard

from llmb.base.errors import UsageError
from llmb.base.shown_text import counted
from llmb.readers.profiles.chrome import STEP_NAME, device_steps, mixed, rank_in_name
from llmb.readers.profiles.classify import CUDA_GRAPH, MEMORY_COPY, Rules
from llmb.readers.profiles.timeline import EVER, LAST_NS, LAUNCH_NAME, Launches, Recorder, Timeline, make_timeline

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""Table of the CUDA graphs recorded as a whole, which is the default; ``KERNELS`` then lacks their kernels."""
COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
LAUNCHES = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
STRINGS = "StringIds"
GPUS = "TARGET_INFO_GPU"
NO_THREAD = ~0xFFFFFF
"""Mask that turns a ``globalTid``, whose lowest 24 bits are the thread, into the ``globalPid`` of GPU activities."""
SPLIT_GRAPHS = "record kernels of CUDA graphs with 'nsys profile --cuda-graph-trace=node'"
Row = tuple[object, ...]


@dataclass(slots=True)
class _Process:
    activities: Recorder = field(default_factory=Recorder)
    host: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each step on the host in nanoseconds, by step number."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Start of each step in nanoseconds and the step's number, sorted."""
    launches: Launches = field(default_factory=Launches)
    ends: dict[int, int] = field(default_factory=dict)
    """Times in nanoseconds at which the GPU finished the work launched by a step, by step number."""
    graphs: int = 0
    without_time: int = 0

    def add_end(self, launched: int, end: int) -> None:
        """Note that work launched at ``launched`` ended at ``end``, for the step in which it was launched."""
        place = bisect_right(self.starts, launched, key=lambda start: start[0]) - 1
        number = self.starts[place][1] if place >= 0 else None
        if number is not None and launched < self.host[number][1]:
            self.ends[number] = max(end, self.ends.get(number, end))

    def notes(self) -> list[str]:
        notes = []
        if self.graphs:
            notes.append(f"not split: {counted(self.graphs, 'CUDA graph')} recorded as a whole; {SPLIT_GRAPHS}")
        if self.without_time:
            notes.append(f"left out: {counted(self.without_time, 'event')} without a valid time")
        return notes


def read_nsys(path: Path, rules: Rules, *, unmarked: bool = False) -> list[Timeline]:
    """Return one timeline per process that used a GPU.

    Raise UsageError for an unusable file. ``unmarked`` is as in ``make_timeline``.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            return list(_timelines(_Export(path, connection), rules, unmarked=unmarked))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if a message quotes a damaged schema
        raise _unreadable(path, f"is not an SQLite database that can be read: {error}") from error


class _Export:
    """Queries of an export. Names of tables and columns in queries are constants of this module."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection
        self.columns = cache(self._columns)

    def _columns(self, table: str) -> frozenset[str]:
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        if not self.connection.execute(query, (table,)).fetchone():
            return frozenset()
        return frozenset(row[1] for row in self.connection.execute(f"PRAGMA table_info({table})"))

    def has(self, table: str, *columns: str) -> bool:
        return self.columns(table) >= set(columns) and bool(self.columns(table))

    def processes(self) -> list[int | None]:
        """Return the identifiers of processes that used a GPU; a single None if the export identifies none."""
        owners: set[int | None] = set()
        for table in (KERNELS, GRAPHS):
            if not self.has(table, "globalPid"):
                owners |= {None} if self.columns(table) else set()
                continue
            rows = self.connection.execute(f"SELECT DISTINCT globalPid FROM {table}")  # noqa: S608
            owners.update(row[0] for row in rows if isinstance(row[0], int))
        return sorted(owners - {None}, key=lambda process: process or 0) or [None]

    def gpu_name(self) -> str | None:
        """Return the name of the first GPU of the node; None if the export does not contain it."""
        query = f"SELECT name FROM {GPUS} ORDER BY id"  # noqa: S608
        found = self.connection.execute(query).fetchone() if self.has(GPUS, "id", "name") else None
        return found[0] if found and isinstance(found[0], str) else None

    def has_several_gpus(self) -> bool:
        """Return whether kernels of one process ran on several GPUs."""
        process = "globalPid" if self.has(KERNELS, "globalPid") else "NULL"
        query = f"SELECT 1 FROM {KERNELS} GROUP BY {process} HAVING COUNT(DISTINCT deviceId) > 1"  # noqa: S608
        return self.has(KERNELS, "deviceId") and self.connection.execute(query).fetchone() is not None

    def activities(self, table: str, name: str) -> Iterator[Row]:
        """Yield the start, end, process and ``name`` of each row of a table of GPU activities."""
        if not self.has(table, "start", "end"):
            return
        process = "t.globalPid" if self.has(table, "globalPid") else "NULL"
        names = f"LEFT JOIN {STRINGS} s ON s.id = t.{name}" if name in self.columns(table) else ""
        text = "s.value" if names else "NULL"
        yield from self.connection.execute(f"SELECT t.start, t.end, {process}, {text} FROM {table} t {names}")  # noqa: S608

    def ranges(self) -> Iterator[Row]:
        """Yield the start, end, thread and text of each range on the host that has an end."""
        if not self.has(RANGES, "start", "end"):
            return
        columns = self.columns(RANGES)
        thread = "r.globalTid" if "globalTid" in columns else "NULL"
        name_of = f"LEFT JOIN {STRINGS} s ON s.id = r.textId" if "textId" in columns else ""
        texts = [text for text, exists in (("r.text", "text" in columns), ("s.value", name_of)) if exists] or ["NULL"]
        text = f"COALESCE({', '.join(texts)})" if len(texts) > 1 else texts[0]
        query = f"SELECT r.start, r.end, {thread}, {text} FROM {RANGES} r {name_of} WHERE r.end IS NOT NULL"  # noqa: S608
        yield from self.connection.execute(query)

    def _owner(self, table: str) -> tuple[str, str, str]:
        if not (self.has(LAUNCHES, "globalTid") and self.has(table, "globalPid")):
            return "NULL", "NULL", ""
        return "l.globalTid", "globalPid", "AND k.process = (l.globalTid & :mask)"

    def launched(self, table: str) -> Iterator[Row]:
        """Yield for each launch of recorded work its start and thread, and the end of that work."""
        if not self.has(LAUNCHES, "start", "correlationId") or not self.has(table, "end", "correlationId"):
            return
        thread, process, condition = self._owner(table)
        query = f"""SELECT l.start, {thread}, k.done FROM {LAUNCHES} l JOIN
            (SELECT correlationId AS id, {process} AS process, MAX(end) AS done FROM {table} GROUP BY 1, 2) k
            ON k.id = l.correlationId {condition}"""  # noqa: S608
        yield from self.connection.execute(query, {"mask": NO_THREAD})

    def kernel_launches(self) -> Iterator[Row]:
        """Yield each kernel launch: its start, thread and function, and its kernel's identifier or None."""
        complete = self.has(LAUNCHES, "start", "correlationId", "nameId") and self.has(KERNELS, "correlationId")
        if not complete:
            return
        thread, process, condition = self._owner(KERNELS)
        query = f"""SELECT l.start, {thread}, s.value, k.id FROM {LAUNCHES} l JOIN {STRINGS} s ON s.id = l.nameId
            LEFT JOIN (SELECT DISTINCT correlationId AS id, {process} AS process FROM {KERNELS}) k
            ON k.id = l.correlationId {condition} WHERE s.value LIKE '%Launch%Kernel%'"""  # noqa: S608
        yield from self.connection.execute(query, {"mask": NO_THREAD})


def _timelines(export: _Export, rules: Rules, *, unmarked: bool) -> Iterator[Timeline]:
    if not export.columns(STRINGS) or not (export.columns(KERNELS) or export.columns(GRAPHS)):
        raise _unreadable(export.path, f"has no GPU kernels (table {KERNELS})")
    if export.has_several_gpus():
        raise mixed(export.path, None)
    processes = {process: _Process() for process in export.processes()}
    _add_activities(export, processes, rules)
    _add_steps(export, processes)
    _add_launches(export, processes)
    for identifier, process in processes.items():
        rank = rank_in_name(export.path) if len(processes) == 1 else None
        source = export.path.name if len(processes) == 1 else f"{export.path.name} process {(identifier or 0) >> 24}"
        left_out, dropped = process.launches.incomplete(process.host or ({0: EVER} if unmarked else {}))
        steps = [step for step in device_steps(process.host, process.ends) if step.number not in left_out]
        whole, notes = unmarked and not left_out, process.notes() + dropped
        made = make_timeline(source, rank, "gpu", steps, [process.activities], notes, unmarked=whole)
        yield replace(made, gpu_name=export.gpu_name())


def _add_activities(export: _Export, processes: dict[int | None, _Process], rules: Rules) -> None:
    column = "demangledName" if export.has(KERNELS, "demangledName") else "shortName"
    for table in (KERNELS, GRAPHS, *COPIES):
        for start, end, identifier, text in export.activities(table, column):
            process = _own(processes, identifier)
            if process is None:
                continue
            # Both times of a graph are 0 if they could not be recorded.
            if not (_is_time(start) and _is_time(end) and start <= end) or (table == GRAPHS and end == 0):
                process.without_time += 1
            elif table == KERNELS:
                name = text if isinstance(text, str) else "(without a name)"
                process.activities.add(start, end, name, rules.kernel(name))
            elif table == GRAPHS:
                process.activities.add(start, end, "CUDA graph", CUDA_GRAPH)
                process.graphs += 1
            else:
                process.activities.add(start, end, table.rpartition("_")[2].capitalize(), MEMORY_COPY)


def _add_steps(export: _Export, processes: dict[int | None, _Process]) -> None:
    for start, end, thread, text in export.ranges():
        match = STEP_NAME.fullmatch(text) if isinstance(text, str) else None
        process = _own(processes, thread & NO_THREAD if isinstance(thread, int) else None)
        if not match or not process:
            continue
        if int(match[1]) in process.host:
            raise mixed(export.path, int(match[1]))
        if _is_time(start) and _is_time(end) and start <= end:
            process.host[int(match[1])] = (start, end)
        else:
            process.without_time += 1
    for process in processes.values():
        process.starts = sorted((span[0], number) for number, span in process.host.items())
    for table in (KERNELS, GRAPHS):
        for launched, thread, finish in export.launched(table):
            owner = _own(processes, thread & NO_THREAD if isinstance(thread, int) else None)
            if owner and _is_time(launched) and _is_time(finish):
                owner.add_end(launched, finish)


def _add_launches(export: _Export, processes: dict[int | None, _Process]) -> None:
    for number, (start, thread, name, kernel) in enumerate(export.kernel_launches()):
        owner = _own(processes, thread & NO_THREAD if isinstance(thread, int) else None)
        if owner and _is_time(start) and isinstance(name, str) and LAUNCH_NAME.match(name):
            owner.launches.launch(number, start)
            if kernel is not None:
                owner.launches.record(number)


def _own(processes: dict[int | None, _Process], identifier: object) -> _Process | None:
    if isinstance(identifier, int) and None not in processes:
        return processes.get(identifier)
    return next(iter(processes.values())) if len(processes) == 1 else None


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and -LAST_NS < value < LAST_NS


def _unreadable(path: Path, what: str) -> UsageError:
    return UsageError(
        f"not a trace: the file {what}",
        where=str(path),
        do="record with 'nsys profile --trace=cuda,nvtx COMMAND', and export with 'nsys export --type sqlite REPORT'",
    )

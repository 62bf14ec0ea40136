# SPDX-License-Identifier: Apache-2.0
"""Summarizes the communication in NCCL's logs: callers, counts and sizes."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.readers.nccl.nccl_log import Call, Calls, Handle, NcclLog, Reason, unclear_names

CODES = Path(__file__).parent / "data" / "nccl.yaml"
MOST_NAMED = 4


class Datatype(Record):
    name: str
    bytes: int


class CodesFile(Record):
    """The content of ``nccl.yaml``."""

    datatypes: dict[int, Datatype]
    elements: dict[str, Literal["count", "count_times_ranks"]]


class Codes:
    def __init__(self, path: Path = CODES) -> None:
        self.path = path

    @cached_property
    def file(self) -> CodesFile:
        return read_file(self.path, CodesFile)

    def datatype(self, code: int) -> str:
        datatype = self.file.datatypes.get(code)
        return datatype.name if datatype else f"code {code}"

    def bytes(self, operation: str, elements: int, datatype: int, ranks: int) -> int | None:
        """Return the bytes, as in nccl-tests, of calls with ``elements`` in total; None for an unknown call or type."""
        kind, moved = self.file.datatypes.get(datatype), self.file.elements.get(operation)
        if kind is None or moved is None:
            return None
        return elements * kind.bytes * (ranks if moved == "count_times_ranks" else 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal calls, summed over the communicators that make the same calls."""

    operation: str
    datatype: str
    ranks: int
    """Number of ranks of each communicator."""
    communicators: int | None
    """Number of communicators; None if neither identifiers nor the number of ranks show it."""
    communicators_from: Literal["init lines", "number of ranks"] | None
    """The source of ``communicators``, if known: the log's own identifiers, or the assumption that all ranks logged."""
    communicator_names: tuple[str, ...]
    """Some of the communicators' identifiers; empty if they are unknown or ambiguous."""
    logged_ranks: int
    """Number of ranks that make these calls, in all communicators."""
    count: int | None
    """Elements of each call; None if several sizes are grouped."""
    count_least: int
    count_most: int
    calls: int
    calls_per_rank: float
    bytes_per_call: float | None
    """Algorithm bytes of a call, as nccl-tests define them (S); a mean if several sizes are grouped."""
    bytes_per_rank: float | None
    """Algorithm bytes of all calls of one rank."""


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """The calls of one step: the total of all logged ranks, and the mean per rank."""

    step: int
    calls: int
    calls_per_rank: float
    bytes_per_rank: float | None


@dataclass(frozen=True, slots=True)
class NcclSummary:
    calls: int
    logged_ranks: int
    collectives: tuple[Collective, ...]
    """Sorted by the bytes of all logged ranks, largest first."""
    steps: tuple[StepTraffic, ...]
    """Empty if steps are unknown."""
    coarse: bool
    notes: tuple[str, ...] = ()
    """Reasons why communicators are not identified or not distinguished."""


def summarize_nccl(log: NcclLog, codes: Codes) -> NcclSummary:
    used = {call.handle for call in log.calls}
    handles = {number: log.handles[number] for number in used}
    unclear = unclear_names(log.handles)
    ranks = len({_rank(handle) for handle in handles.values()})
    rows = [row for group in _groups(log, unclear) for row in _rows(group, codes)]
    rows.sort(key=lambda row: (-(row.bytes_per_rank or 0) * row.logged_ranks, row.operation, -row.count_least))
    steps = tuple(_step(step, kinds, ranks, codes) for step, kinds in sorted(log.steps.items()))
    calls = sum(calls.number for calls in log.calls.values())
    notes = tuple(_notes(list(handles.values()), unclear))
    return NcclSummary(calls, ranks, tuple(rows), steps, log.coarse, notes)


def _rank(handle: Handle) -> tuple[str, int]:
    """A process may have several devices, each of them a rank."""
    return handle.process, handle.device


REASONS: dict[Reason, str] = {
    "no init line": "the log has no line that initializes them (NCCL_DEBUG_SUBSYS=INIT)",
    "unknown parent": "they belong to splits of unidentified communicators",
    "equal splits": "the log describes several communicators alike, such as splits before NCCL 2.24",
}


def _notes(handles: Sequence[Handle], unclear: Collection[str]) -> Iterable[str]:
    reasons = Counter("equal splits" if handle.name in unclear else handle.reason for handle in handles)
    for reason, text in REASONS.items():
        if number := reasons[reason]:
            yield f"{number} of {len(handles)} pointers to communicators are not identified: {text}"
    unnamed = sum(handle.process.partition(":")[2].startswith("[") for handle in handles)
    if unnamed:
        yield f"{unnamed} of {len(handles)} pointers are in lines without a process: equal ones count as one"


Shape = tuple[str, int, int, int]
"""A call without its communicator: operation, least and most elements, datatype."""


@dataclass(slots=True)
class _Communicator:
    """All logged handles of one communicator; a single handle if other ranks' handles cannot be identified."""

    ranks: int
    name: str | None
    handles: dict[int, Handle]
    shapes: dict[Shape, Calls]


def _groups(log: NcclLog, unclear: Collection[str]) -> Iterable[list[_Communicator]]:
    by_name: dict[tuple[str | int, int], _Communicator] = {}
    for call, calls in log.calls.items():
        handle = log.handles[call.handle]
        name = None if handle.name in unclear else handle.name
        key = (call.handle if name is None else name, call.ranks)
        communicator = by_name.setdefault(key, _Communicator(call.ranks, name, {}, {}))
        communicator.handles[call.handle] = handle
        sums = communicator.shapes.setdefault(_shape(call), Calls())
        sums.number += calls.number
        sums.elements += calls.elements
    groups: dict[object, list[_Communicator]] = defaultdict(list)
    for communicator in by_name.values():
        shapes = frozenset((shape, calls.number) for shape, calls in communicator.shapes.items())
        groups[communicator.ranks, communicator.name is None, len(communicator.handles), shapes].append(communicator)
    return groups.values()


def _shape(call: Call) -> Shape:
    return call.operation, call.least, call.most, call.datatype


def _rows(group: list[_Communicator], codes: Codes) -> Iterable[Collective]:
    first = group[0]
    handles = sum(len(item.handles) for item in group)
    logged = len({_rank(handle) for item in group for handle in item.handles.values()})
    names = [item.name for item in group if item.name]
    assumed = handles // first.ranks if handles % first.ranks == 0 else None
    for shape in first.shapes:
        operation, least, most, datatype = shape
        number = sum(item.shapes[shape].number for item in group)
        elements = sum(item.shapes[shape].elements for item in group)
        size = codes.bytes(operation, elements, datatype, first.ranks)
        yield Collective(
            operation=operation,
            datatype=codes.datatype(datatype),
            ranks=first.ranks,
            communicators=len(group) if names else assumed,
            communicators_from="init lines" if names else "number of ranks" if assumed else None,
            communicator_names=tuple(sorted(names)[:MOST_NAMED]),
            logged_ranks=logged,
            count=least if least == most else None,
            count_least=least,
            count_most=most,
            calls=number,
            calls_per_rank=number / logged,
            bytes_per_call=None if size is None else size / number,
            bytes_per_rank=None if size is None else size / logged,
        )


def _step(step: int, kinds: Mapping[tuple[str, int, int], Calls], logged: int, codes: Codes) -> StepTraffic:
    sizes = [codes.bytes(operation, calls.elements, code, ranks) for (operation, code, ranks), calls in kinds.items()]
    values = [size for size in sizes if size is not None]
    number = sum(calls.number for calls in kinds.values())
    return StepTraffic(step, number, number / logged, sum(values) / logged if len(values) == len(sizes) else None)

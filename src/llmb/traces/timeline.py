# SPDX-License-Identifier: Apache-2.0
"""The activities of one process over time, independent of the profiler."""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmb.traces.classify import OTHER, Activity, Label
from llmb.traces.intervals import Span, union

Device = Literal["gpu", "cpu"]


class TracedStep(NamedTuple):
    """A training step by its number, in nanoseconds of the trace's clock."""

    number: int
    start: int
    end: int


class NameTime(NamedTuple):
    """All activities of one name, summed over the steps of a trace."""

    name: str
    activity: Activity
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The activities of one process by label, merged into disjoint spans."""

    source: str
    rank: int | None
    """None if neither the trace nor its file name has it."""
    device: Device
    steps: tuple[TracedStep, ...]
    spans: Mapping[Label, Sequence[Span]]
    calls: Mapping[Label, Sequence[int]]
    """When each communication began, in order."""
    names: tuple[NameTime, ...]
    """Sorted by time, longest first."""


class Recorded(NamedTuple):
    start: int
    end: int
    name: int
    label: int


class Recorder:
    """One activity as read from a file, 24 bytes; names and labels are stored once."""

    def __init__(self) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.name_numbers = array("i")
        self.label_numbers = array("i")
        self.names: dict[str, int] = {}
        self.labels: dict[Label, int] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, start: int, end: int, name: str, label: Label) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.name_numbers.append(self.names.setdefault(name, len(self.names)))
        self.label_numbers.append(self.labels.setdefault(label, len(self.labels)))

    def rows(self) -> Iterator[Recorded]:
        """In the order in which they were added."""
        return map(Recorded, self.starts, self.ends, self.name_numbers, self.label_numbers)

    def in_order(self) -> Iterator[Recorded]:
        """By start. Of activities that start together the longest comes first, as it contains the others."""
        order = sorted(range(len(self)), key=lambda i: (self.starts[i], -self.ends[i]))
        return (Recorded(self.starts[i], self.ends[i], self.name_numbers[i], self.label_numbers[i]) for i in order)


def leaves(thread: Recorder) -> Recorder:
    """Flattens the nested operators of one thread, so that no instant counts twice.

    An instant belongs to the outermost operator that has a class: attention includes its matrix products. If there is
    none, it belongs to the innermost: ``aten::linear``, which has no class, leaves its time to ``aten::mm``.
    """
    flat = Recorder()
    names, labels = list(thread.names), list(thread.labels)
    open_: list[Recorded] = []
    last: Recorded | None = None
    at = 0

    def owner() -> Recorded:
        return next((row for row in open_ if labels[row.label] != OTHER), open_[-1])

    def advance(to: int) -> None:
        nonlocal at, last
        if open_ and to > at:
            row = owner()
            if row is last and flat.ends[-1] == at:
                flat.ends[-1] = to
            else:
                flat.add(at, to, names[row.name], labels[row.label])
            last = row
        at = max(at, to)

    for row in thread.in_order():
        while open_ and open_[-1].end <= row.start:
            advance(open_[-1].end)
            open_.pop()
        advance(row.start)
        # Timestamps are rounded: an operator may seem to outlast its parent by a nanosecond.
        open_.append(row._replace(end=min(row.end, open_[-1].end)) if open_ else row)
    while open_:
        advance(open_[-1].end)
        open_.pop()
    return flat


def make_timeline(
    source: str, rank: int | None, device: Device, steps: Sequence[TracedStep], recorders: Sequence[Recorder]
) -> Timeline:
    """``recorders`` hold what ran in parallel: the threads of a CPU, whose operators are nested, or a GPU."""
    calls_of = _calls(steps, recorders)
    if device == "cpu":
        recorders = [leaves(recorder) for recorder in recorders]
    spans: dict[Label, list[Span]] = {}
    calls: dict[Label, list[int]] = {}
    for recorder in recorders:
        labels = list(recorder.labels)
        for row in recorder.rows():
            spans.setdefault(labels[row.label], []).append((row.start, row.end))
    for label, found in spans.items():
        if label.activity is Activity.COMMUNICATION:
            calls[label] = sorted(start for start, _ in found)
        spans[label] = union(found)
    ordered = tuple(sorted(steps, key=lambda step: step.start))
    return Timeline(source, rank, device, ordered, spans, calls, _names(ordered, recorders, calls_of))


def _calls(steps: Sequence[TracedStep], recorders: Sequence[Recorder]) -> Counter[str]:
    """The number of calls of each name that began within the steps."""
    counted: Counter[str] = Counter()
    for recorder in recorders:
        names = list(recorder.names)
        counted.update(names[row.name] for row in recorder.rows() if _inside(row, steps))
    return counted


def _names(
    steps: Sequence[TracedStep], recorders: Sequence[Recorder], calls: Mapping[str, int]
) -> tuple[NameTime, ...]:
    """Total times of the activities that began within the steps."""
    sums: Counter[tuple[str, Activity]] = Counter()
    for recorder in recorders:
        names, labels = list(recorder.names), list(recorder.labels)
        for row in recorder.rows():
            if _inside(row, steps):
                sums[names[row.name], labels[row.label].activity] += row.end - row.start
    found = [NameTime(name, activity, calls[name], time) for (name, activity), time in sums.items()]
    return tuple(sorted(found, key=lambda item: (-item.total_ns, item.name)))


def _inside(row: Recorded, steps: Sequence[TracedStep]) -> bool:
    return any(step.start <= row.start < step.end for step in steps)

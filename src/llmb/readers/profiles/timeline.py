# SPDX-License-Identifier: Apache-2.0
"""The activities of one process over time, independent of the profiler, and arithmetic on their spans."""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmb.base.shown_text import counted
from llmb.readers.profiles.classify import OTHER, Activity, Label

Span = tuple[int, int]
Device = Literal["gpu", "cpu"]
LAST_NS = 1 << 62
"""Limit of absolute times in nanoseconds, so that the sum of two fits in 64 bits."""
EVER: Span = (-LAST_NS, LAST_NS)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of ``spans``, sorted and disjoint; ``spans`` may overlap, and be unsorted or empty."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersect(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the intersection of two sorted sequences of disjoint spans."""
    spans: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            spans.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return spans


def subtract(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the spans that ``left`` covers and ``right`` does not; both are sorted and disjoint."""
    rest: list[Span] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > at:
                rest.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def clip(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of sorted, disjoint ``spans`` inside ``window``."""
    first = bisect_right(spans, window[0], key=lambda span: span[1])
    after = bisect_left(spans, window[1], key=lambda span: span[0])
    return [(max(start, window[0]), min(end, window[1])) for start, end in spans[first:after]]


def total(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


class TracedStep(NamedTuple):
    """A training step; its start and end are in nanoseconds of the trace's clock."""

    number: int
    start: int
    end: int


class NameTime(NamedTuple):
    """All activities with one name that began within the steps of a trace."""

    name: str
    activity: Activity
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The activities of one process by label, merged into disjoint spans."""

    source: str
    rank: int | None
    """None if unknown, or if the trace is of several processes."""
    device: Device
    steps: tuple[TracedStep, ...]
    spans: Mapping[Label, Sequence[Span]]
    calls: Mapping[Label, Sequence[int]]
    """The sorted start times of communication, by label."""
    names: tuple[NameTime, ...]
    """Sorted by time, longest first."""
    notes: tuple[str, ...] = ()
    """Remarks on the trace, such as on events left out."""
    gpu_name: str | None = None
    """Name of the first GPU in the trace; None if it is unknown."""
    world_size: int | None = None
    """Number of ranks of the run; None if it is unknown."""


class Recorded(NamedTuple):
    start: int
    end: int
    name: int
    label: int


class Recorder:
    """Recorded activities, 24 bytes each; names and labels are stored once."""

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
        """Yield the rows in the order in which they were added."""
        return map(Recorded, self.starts, self.ends, self.name_numbers, self.label_numbers)

    def in_order(self) -> Iterator[Recorded]:
        """Yield the rows sorted by start; among equal starts, the longest is first."""
        order = sorted(range(len(self)), key=lambda i: (self.starts[i], -self.ends[i]))
        return (Recorded(self.starts[i], self.ends[i], self.name_numbers[i], self.label_numbers[i]) for i in order)


LAUNCH_NAME = re.compile(r"(?:cuda|cu|hip)\w{0,40}Launch\w{0,40}Kernel\w{0,40}")
"""Names of calls that launch one kernel, but not of calls that launch a graph."""
MOST_UNRECORDED = 0.01
"""Maximum fraction of a step's kernels that may be missing."""
STEPS_LEFT_OUT = "left out, as the profiler dropped kernels"
_MOST_NAMED = 5


class Launches:
    """Kernels that the host launched. A profiler may drop some, whose time then looks idle."""

    def __init__(self) -> None:
        self.starts = array("q")
        """The time of each launch in nanoseconds."""
        self.pending: dict[object, int] = {}
        """The launch times in nanoseconds of kernels that have not been recorded so far, by identifier."""
        self.early: set[object] = set()
        """Identifiers of kernels that were read before their launch, or without one."""

    def launch(self, identifier: object, start: int) -> None:
        self.starts.append(start)
        if identifier not in self.early:
            self.pending[identifier] = start

    def record(self, identifier: object) -> None:
        """Record a kernel that ran."""
        if self.pending.pop(identifier, None) is None:
            self.early.add(identifier)

    def incomplete(self, steps: Mapping[int, Span]) -> tuple[set[int], list[str]]:
        """Return the numbers of steps that lack too many kernels, and notes. ``steps`` are ranges on the host."""
        launched, missing = sorted(self.starts), sorted(self.pending.values())
        left_out, notes = set(), {True: list[str](), False: list[str]()}
        for number, span in sorted(steps.items()) if missing else ():
            dropped, every = (_count_within(times, span) for times in (missing, launched))
            if dropped:
                is_left_out = dropped > MOST_UNRECORDED * every
                notes[is_left_out].append(f"step {number} ({dropped:,} of {every:,} kernels)")
                left_out |= {number} if is_left_out else set()
        texts = {True: STEPS_LEFT_OUT, False: "the profiler dropped kernels, whose time looks idle"}
        return left_out, [f"{texts[key]}: {_some(numbers)}" for key, numbers in notes.items() if numbers]


def _count_within(times: Sequence[int], span: Span) -> int:
    return bisect_left(times, span[1]) - bisect_left(times, span[0])


def _some(steps: Sequence[str]) -> str:
    more = [f"{len(steps) - _MOST_NAMED} more"] if len(steps) > _MOST_NAMED else []
    return ", ".join([*steps[:_MOST_NAMED], *more])


def leaves(thread: Recorder) -> Recorder:
    """Flatten one thread's nested operators: an instant belongs to the outermost operator with a class, else to the
    innermost.
    """
    flat = Recorder()
    names, labels = list(thread.names), list(thread.labels)
    open_: list[Recorded] = []
    classed: list[Recorded | None] = []
    """The outermost operator with a class, for each open operator."""
    last: Recorded | None = None
    at = 0

    def advance(to: int) -> None:
        nonlocal at, last
        if open_ and to > at:
            row = classed[-1] or open_[-1]
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
            classed.pop()
        advance(row.start)
        # Timestamps are rounded: an operator may seem to outlast its parent by a nanosecond.
        row = row._replace(end=min(row.end, open_[-1].end)) if open_ else row
        outer = classed[-1] if classed else None
        open_.append(row)
        classed.append(outer or (row if labels[row.label] != OTHER else None))
    while open_:
        advance(open_[-1].end)
        open_.pop()
        classed.pop()
    return flat


def make_timeline(
    source: str,
    rank: int | None,
    device: Device,
    steps: Sequence[TracedStep],
    recorders: Sequence[Recorder],
    notes: Sequence[str] = (),
    *,
    unmarked: bool = False,
) -> Timeline:
    """Make a timeline of parallel activities. If ``unmarked``, a trace without steps becomes a single step."""
    if unmarked and not steps and any(map(len, recorders)):
        begin, end = (
            min(min(one.starts) for one in recorders if len(one)),
            max(max(one.ends) for one in recorders if len(one)),
        )
        steps = [TracedStep(0, begin, end)]
        notes = (*notes, f"no step is marked: the whole trace, {(end - begin) / 1e6:.4g} ms, is shown as step 0")
    empty = sum(step.end <= step.start for step in steps)
    if empty:
        steps = [step for step in steps if step.end > step.start]
        notes = (*notes, f"left out: {counted(empty, 'step')} without a duration")
    calls_of = _calls(steps, recorders)
    if device == "cpu":
        recorders = [leaves(recorder) for recorder in recorders]
    spans: dict[Label, list[Span]] = {}
    calls: dict[Label, list[int]] = {}
    for recorder in recorders:
        labels = list(recorder.labels)
        for row in recorder.rows():
            spans.setdefault(labels[row.label], []).append((row.start, row.end))
    for label, times in spans.items():
        if label.activity is Activity.COMMUNICATION:
            calls[label] = sorted(start for start, _ in times)
        spans[label] = union(times)
    ordered = tuple(sorted(steps, key=lambda step: step.start))
    return Timeline(source, rank, device, ordered, spans, calls, _names(ordered, recorders, calls_of), tuple(notes))


def _calls(steps: Sequence[TracedStep], recorders: Sequence[Recorder]) -> Counter[str]:
    counted: Counter[str] = Counter()
    within = union((step.start, step.end) for step in steps)
    for recorder in recorders:
        names = list(recorder.names)
        counted.update(names[row.name] for row in recorder.rows() if _inside(row, within))
    return counted


def _names(
    steps: Sequence[TracedStep], recorders: Sequence[Recorder], calls: Mapping[str, int]
) -> tuple[NameTime, ...]:
    sums: Counter[tuple[str, Activity]] = Counter()
    within = union((step.start, step.end) for step in steps)
    for recorder in recorders:
        names, labels = list(recorder.names), list(recorder.labels)
        for row in recorder.rows():
            if _inside(row, within):
                sums[names[row.name], labels[row.label].activity] += row.end - row.start
    times = [NameTime(name, activity, calls[name], time) for (name, activity), time in sums.items()]
    return tuple(sorted(times, key=lambda item: (-item.total_ns, item.name)))


def _inside(row: Recorded, within: Sequence[Span]) -> bool:
    place = bisect_right(within, row.start, key=lambda span: span[0])
    return place > 0 and row.start < within[place - 1][1]

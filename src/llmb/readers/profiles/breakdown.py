# SPDX-License-Identifier: Apache-2.0
"""Breaks down a step's time. An instant counts once, for the first running activity in the order of ``Activity``."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llmb.readers.profiles.classify import Activity, Label
from llmb.readers.profiles.timeline import (
    Device,
    NameTime,
    Span,
    Timeline,
    TracedStep,
    clip,
    intersect,
    subtract,
    total,
    union,
)

NS = 1_000_000_000
PARTS = (
    "attention_s",
    "matrix_product_s",
    "other_s",
    "unclassified_s",
    "cuda_graph_s",
    "memory_copy_s",
    "communication_exposed_s",
    "idle_s",
)
"""The parts of a step, which sum to its duration, as fields of ``StepBreakdown``."""
MOST_NAMES = 15


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """All collectives of one kind and group in one step. Collectives of different groups may overlap."""

    kind: str
    group: str | None
    calls: int
    total_s: float
    exposed_s: float
    """Time in which nothing but communication runs."""
    hidden_s: float


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One step on one rank. Its ``PARTS`` sum to ``duration_s``."""

    step: int
    rank: int | None
    duration_s: float
    attention_s: float
    matrix_product_s: float
    other_s: float
    memory_copy_s: float
    communication_exposed_s: float
    idle_s: float
    communication_hidden_s: float
    idle_longest_s: float
    """The longest idle interval."""
    collectives: tuple[CollectiveTime, ...]
    unclassified_s: float = 0.0
    """Time of unclassified kernels."""
    cuda_graph_s: float = 0.0
    """Time of CUDA graphs that were recorded as a whole."""

    @property
    def local_s(self) -> float:
        """The time of this rank without exposed communication."""
        return self.duration_s - self.communication_exposed_s


def break_down(timeline: Timeline) -> list[StepBreakdown]:
    return [_break_down_step(timeline, step) for step in timeline.steps]


def _break_down_step(timeline: Timeline, step: TracedStep) -> StepBreakdown:
    window = (step.start, step.end)
    inside = {label: clip(spans, window) for label, spans in timeline.spans.items()}
    by_activity = {activity: _union_of(inside, activity) for activity in Activity}
    rest: Sequence[Span] = [window] if step.end > step.start else []
    times: dict[Activity, int] = {}
    before_communication = rest
    for activity in Activity:
        if activity is Activity.COMMUNICATION:
            before_communication = rest
        times[activity] = total(intersect(rest, by_activity[activity]))
        rest = subtract(rest, by_activity[activity])
    communication = total(by_activity[Activity.COMMUNICATION])
    return StepBreakdown(
        step=step.number,
        rank=timeline.rank,
        duration_s=(step.end - step.start) / NS,
        attention_s=times[Activity.ATTENTION] / NS,
        matrix_product_s=times[Activity.MATRIX_PRODUCT] / NS,
        other_s=times[Activity.OTHER] / NS,
        unclassified_s=times[Activity.UNCLASSIFIED] / NS,
        cuda_graph_s=times[Activity.CUDA_GRAPH] / NS,
        memory_copy_s=times[Activity.MEMORY_COPY] / NS,
        communication_exposed_s=times[Activity.COMMUNICATION] / NS,
        idle_s=total(rest) / NS,
        communication_hidden_s=(communication - times[Activity.COMMUNICATION]) / NS,
        idle_longest_s=max((end - start for start, end in rest), default=0) / NS,
        collectives=tuple(_collectives(timeline, inside, before_communication, window)),
    )


def _union_of(inside: Mapping[Label, Sequence[Span]], activity: Activity) -> list[Span]:
    return union(span for label, spans in inside.items() if label.activity is activity for span in spans)


def _collectives(
    timeline: Timeline, inside: Mapping[Label, Sequence[Span]], uncovered: Sequence[Span], window: Span
) -> list[CollectiveTime]:
    times = []
    for label, spans in inside.items():
        if label.activity is not Activity.COMMUNICATION or not spans:
            continue
        starts = timeline.calls[label]
        whole, exposed = total(spans), total(intersect(spans, uncovered))
        times.append(
            CollectiveTime(
                kind=label.kind or "other",
                group=label.group,
                calls=bisect_left(starts, window[1]) - bisect_left(starts, window[0]),
                total_s=whole / NS,
                exposed_s=exposed / NS,
                hidden_s=(whole - exposed) / NS,
            )
        )
    return sorted(times, key=lambda item: (-item.total_s, item.kind, item.group or ""))


@dataclass(frozen=True, slots=True)
class RankTrace:
    source: str
    rank: int | None
    device: Device
    steps: tuple[StepBreakdown, ...]
    names: tuple[NameTime, ...]
    """The names with the longest total times over all steps."""
    unclassified: tuple[NameTime, ...] = ()
    """The unclassified kernels with the longest total times."""
    notes: tuple[str, ...] = ()
    """Remarks on the trace, such as on events left out."""
    gpu_name: str | None = None
    world_size: int | None = None

    @property
    def label(self) -> str:
        return self.source if self.rank is None else f"rank {self.rank}"

    @property
    def typical(self) -> StepBreakdown:
        """The step with the median duration; of two middle ones, the shorter."""
        ordered = sorted(self.steps, key=lambda step: (step.duration_s, step.step))
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank with the longest mean step without exposed communication."""

    label: str
    local_s: float
    """Mean time of a step without exposed communication."""
    others_local_s: float
    """The median of this mean over the other ranks."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    ranks: tuple[RankTrace, ...]
    slowest: Slowest | None
    """None for a single rank."""


def summarize(timelines: Iterable[Timeline]) -> TraceSummary:
    """Summarize timelines, sorted by rank; timelines without a rank come last, in their original order."""
    ranks = sorted(map(_rank_trace, timelines), key=lambda item: (item.rank is None, item.rank))
    return TraceSummary(tuple(ranks), _slowest(ranks))


def _rank_trace(timeline: Timeline) -> RankTrace:
    steps = tuple(break_down(timeline))
    unknown = [item for item in timeline.names if item.activity is Activity.UNCLASSIFIED]
    return RankTrace(
        source=timeline.source,
        rank=timeline.rank,
        device=timeline.device,
        steps=steps,
        names=timeline.names[:MOST_NAMES],
        unclassified=tuple(unknown[:MOST_NAMES]),
        notes=timeline.notes,
        gpu_name=timeline.gpu_name,
        world_size=timeline.world_size,
    )


def _slowest(ranks: Sequence[RankTrace]) -> Slowest | None:
    if len(ranks) < 2:
        return None
    times = [fmean(step.local_s for step in rank.steps) for rank in ranks]
    worst = times.index(max(times))
    return Slowest(ranks[worst].label, times[worst], median(times[:worst] + times[worst + 1 :]))


def shares(step: StepBreakdown) -> dict[str, float]:
    """Return each part of a step as a fraction of its duration; the fractions sum to 1."""
    return {part.removesuffix("_s"): getattr(step, part) / step.duration_s for part in PARTS}

# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step went. Pure.

Every instant of a step counts once. If several activities run at that instant on any stream or thread, it counts for
the first of them in the order of ``Activity``; if none runs, it is idle. The parts therefore sum to the step.
Communication that overlaps computation or copies is hidden: it does not lengthen the step, and is reported separately.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmb.traces.classify import Activity, Label
from llmb.traces.intervals import Span, clip, intersect, subtract, total, union
from llmb.traces.timeline import Timeline, TracedStep

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """All collectives of one kind and group in one step. Collectives of several groups may overlap."""

    kind: str
    group: str | None
    calls: int
    total_s: float
    exposed_s: float
    """Time in which nothing but communication runs."""
    hidden_s: float


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One step of one rank. Its ``PARTS`` sum to ``duration_s``."""

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
    """The longest interval in which nothing ran."""
    collectives: tuple[CollectiveTime, ...]
    unclassified_s: float = 0.0
    """Kernels that no rule knows."""
    cuda_graph_s: float = 0.0
    """CUDA graphs that were recorded as a whole."""

    @property
    def own_s(self) -> float:
        """The time in which this rank did anything but exposed communication."""
        return self.duration_s - self.communication_exposed_s


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


def break_down(timeline: Timeline) -> list[StepBreakdown]:
    return [_break_down_step(timeline, step) for step in timeline.steps]


def _break_down_step(timeline: Timeline, step: TracedStep) -> StepBreakdown:
    window = (step.start, step.end)
    inside = {label: clip(spans, window) for label, spans in timeline.spans.items()}
    by_activity = {activity: _union_of(inside, activity) for activity in Activity}
    rest: Sequence[Span] = [window] if step.end > step.start else []
    taken: dict[Activity, int] = {}
    before_communication = rest
    for activity in Activity:
        if activity is Activity.COMMUNICATION:
            before_communication = rest
        taken[activity] = total(intersect(rest, by_activity[activity]))
        rest = subtract(rest, by_activity[activity])
    communication = total(by_activity[Activity.COMMUNICATION])
    return StepBreakdown(
        step=step.number,
        rank=timeline.rank,
        duration_s=(step.end - step.start) / NS,
        attention_s=taken[Activity.ATTENTION] / NS,
        matrix_product_s=taken[Activity.MATRIX_PRODUCT] / NS,
        other_s=taken[Activity.OTHER] / NS,
        unclassified_s=taken[Activity.UNCLASSIFIED] / NS,
        cuda_graph_s=taken[Activity.CUDA_GRAPH] / NS,
        memory_copy_s=taken[Activity.MEMORY_COPY] / NS,
        communication_exposed_s=taken[Activity.COMMUNICATION] / NS,
        idle_s=total(rest) / NS,
        communication_hidden_s=(communication - taken[Activity.COMMUNICATION]) / NS,
        idle_longest_s=max((end - start for start, end in rest), default=0) / NS,
        collectives=tuple(_collectives(timeline, inside, before_communication, window)),
    )


def _union_of(inside: Mapping[Label, Sequence[Span]], activity: Activity) -> list[Span]:
    return union(span for label, spans in inside.items() if label.activity is activity for span in spans)


def _collectives(
    timeline: Timeline, inside: Mapping[Label, Sequence[Span]], uncovered: Sequence[Span], window: Span
) -> list[CollectiveTime]:
    """Sorted by time, longest first. ``uncovered`` is the time in which nothing else runs."""
    found = []
    for label, spans in inside.items():
        if label.activity is not Activity.COMMUNICATION or not spans:
            continue
        starts = timeline.calls[label]
        whole, exposed = total(spans), total(intersect(spans, uncovered))
        found.append(
            CollectiveTime(
                kind=label.kind or "other",
                group=label.group,
                calls=bisect_left(starts, window[1]) - bisect_left(starts, window[0]),
                total_s=whole / NS,
                exposed_s=exposed / NS,
                hidden_s=(whole - exposed) / NS,
            )
        )
    return sorted(found, key=lambda item: (-item.total_s, item.kind, item.group or ""))

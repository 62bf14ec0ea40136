# SPDX-License-Identifier: Apache-2.0
"""Compares several ranks. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llmb.traces.breakdown import PARTS, StepBreakdown, break_down
from llmb.traces.classify import Activity
from llmb.traces.timeline import Device, NameTime, Timeline

MOST_NAMES = 15


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The steps of one process."""

    source: str
    rank: int | None
    device: Device
    steps: tuple[StepBreakdown, ...]
    names: tuple[NameTime, ...]
    """The longest kernels (on a CPU: operators), summed over all steps."""
    unclassified: tuple[NameTime, ...] = ()
    """The longest of those kernels that no rule knows."""
    notes: tuple[str, ...] = ()
    """What of the trace could not be read."""

    @property
    def label(self) -> str:
        return self.source if self.rank is None else f"rank {self.rank}"

    @property
    def typical(self) -> StepBreakdown:
        """The step with the median duration; of two in the middle the earlier."""
        ordered = sorted(self.steps, key=lambda step: (step.duration_s, step.step))
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that the others wait for: it spends the least time waiting in communication."""

    label: str
    own_s: float
    """Mean time of a step without exposed communication."""
    others_own_s: float
    """Median of the other ranks."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    ranks: tuple[RankTrace, ...]
    slowest: Slowest | None
    """None for a single rank."""


def summarize(timelines: Iterable[Timeline]) -> TraceSummary:
    """Sorted by rank; those without one come last, in the given order."""
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
    )


def _slowest(ranks: Sequence[RankTrace]) -> Slowest | None:
    if len(ranks) < 2:
        return None
    own = [fmean(step.own_s for step in rank.steps) for rank in ranks]
    worst = own.index(max(own))
    return Slowest(ranks[worst].label, own[worst], median(own[:worst] + own[worst + 1 :]))


def shares(step: StepBreakdown) -> dict[str, float]:
    """Each part of a step divided by its duration; the parts sum to 1."""
    return {part.removesuffix("_s"): getattr(step, part) / step.duration_s for part in PARTS}

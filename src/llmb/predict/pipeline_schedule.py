# SPDX-License-Identifier: Apache-2.0
"""When a rank of a pipeline may be fullest: what it holds between the passes of a step."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby, zip_longest
from operator import ge
from typing import NamedTuple

from llmb.catalogue.records import Layout

GATHERED = 3
"""Stages of a rank whose sharded parameters are whole at a time: those that come next
(torch/distributed/pipelining/schedules.py, _add_unshard_reshard)."""


class PeakMoment(NamedTuple):
    """When a forward or a backward pass of a rank ends.

    held: how many micro-batches each of its stages holds. begun: stages that have gradients. gathered: how many stages
    have whole parameters, if they are sharded. passes: whether a backward pass finds all of this, so that what it
    computes comes on top. ends: whether that pass is one of the last stage. adds: whether gradients have just been
    computed that are added to others.
    """

    held: tuple[int, ...]
    begun: tuple[bool, ...]
    gathered: int
    passes: bool
    ends: bool
    adds: bool

    def amounts(self) -> tuple[int, ...]:
        return (*self.held, *self.begun, self.gathered, self.passes, self.ends, self.adds)


def together_in_turn(layout: Layout) -> int:
    """How many micro-batches of a virtual stage follow each other."""
    return layout.ga // max(1, layout.ga // layout.pp)


def moments(layout: Layout, pp_rank: int) -> tuple[PeakMoment, ...]:
    """Finds when a rank may be fullest, until its pipeline is in its steady state, and at its end.

    1F1B and interleaved 1F1B (Narayanan et al., 2021), as torch's schedules have them.
    """
    vp, micro_batches = layout.vp, layout.ga
    whole, together = micro_batches * vp, 1
    if vp == 1:
        ahead = min(whole, layout.pp - 1 - pp_rank)
    else:
        together = together_in_turn(layout)
        ahead = min(whole, (vp - 1) * together + 2 * (layout.pp - 1 - pp_rank))
    return _moments(vp, together, ahead, min(whole, ahead + 2 * together * vp))


@cache
def _moments(vp: int, together: int, ahead: int, count: int) -> tuple[PeakMoment, ...]:
    """``ahead`` of ``count`` passes are forward before the first backward one, and ``together`` of a stage in turn."""
    forward = [done // together % vp for done in range(count)]
    passes = zip_longest(forward, [None] * ahead + [vp - 1 - stage for stage in forward])
    # Of those that differ only in the stages that have gradients, the last one has the most.
    last = {each._replace(begun=()): each for each in _after_passes(vp, passes)}
    return _largest(last.values())


def _after_passes(vp: int, passes: Iterable[tuple[int | None, int | None]]) -> Iterator[PeakMoment]:
    """Moments that may be the fullest, from the stages of each forward pass and of the backward pass that follows it.

    While both stay the same, what is held changes evenly, so that only an end can be the fullest; the first of them
    counts for itself, because gradients begin with it.
    """
    held, begun = [0] * vp, [False] * vp
    for (forward, backward), alike in groupby(passes):
        count = len(list(alike))
        for size in (1, 1, count - 2) if count > 2 else (1,) * count:
            if forward is not None:
                held[forward] += size
            if backward is not None:
                held[backward] -= size - 1
            coming = vp if forward is not None else sum(map(bool, held))
            ends = backward == vp - 1
            whole = min(coming, GATHERED)
            yield PeakMoment(tuple(held), tuple(begun), whole, passes=backward is not None, ends=ends, adds=False)
            if backward is None:
                continue
            held[backward] -= 1
            adds, begun[backward] = begun[backward], True
            yield PeakMoment(tuple(held), tuple(begun), whole, passes=False, ends=False, adds=adds)


def _largest(found: Iterable[PeakMoment]) -> tuple[PeakMoment, ...]:
    """Without those than which another is at least as large, at every place."""
    largest: dict[tuple[int, ...], PeakMoment] = {}
    for one in sorted(found, key=lambda each: sum(each.amounts()), reverse=True):
        amounts = one.amounts()
        if not any(all(map(ge, other, amounts)) for other in largest):
            largest[amounts] = one
    return tuple(largest.values())

# SPDX-License-Identifier: Apache-2.0
"""When a rank of a pipeline may be fullest: what it holds between the passes of a step."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import ge
from typing import NamedTuple

from llmb.catalogue.records import Layout

GATHERED = 3
"""Stages of a rank whose sharded parameters are whole at a time: those that come next
(torch/distributed/pipelining/schedules.py, _add_unshard_reshard)."""


class PeakMoment(NamedTuple):
    """When a forward or a backward pass of a rank ends.

    held: how many micro-batches each of its stages holds. begun: stages that have gradients. gathered: how many stages
    have whole parameters, if they are sharded. passes: whether the next pass finds all of this: what it computes comes
    on top. adds: whether gradients have just been computed that are added to others.
    """

    held: tuple[int, ...]
    begun: tuple[bool, ...]
    gathered: int
    passes: bool
    adds: bool

    def amounts(self, *, begins: bool) -> tuple[int, ...]:
        return (*self.held, *(self.begun if begins else ()), self.gathered, self.passes, self.adds)


def moments(layout: Layout, pp_rank: int, *, begins: bool) -> frozenset[PeakMoment]:
    """Finds when a rank may be fullest, until its pipeline is in its steady state, and at its end.

    begins: whether it matters which stages have gradients.

    1F1B and interleaved 1F1B (Narayanan et al., 2021), as torch's schedules have them.
    """
    return _moments(layout.pp, layout.vp, layout.ga, pp_rank, begins=begins)


@cache
def _moments(pp: int, vp: int, micro_batches: int, pp_rank: int, *, begins: bool) -> frozenset[PeakMoment]:
    whole, together = micro_batches * vp, micro_batches
    if vp == 1:
        ahead = min(whole, pp - 1 - pp_rank)
    else:
        together = micro_batches // max(1, micro_batches // pp)
        ahead = min(whole, (vp - 1) * together + 2 * (pp - 1 - pp_rank))
    forward = [done // together % vp for done in range(min(whole, ahead + 2 * together * vp))]
    backward = [vp - 1 - stage for stage in forward]
    found = {each.amounts(begins=begins): each for each in _after_passes(vp, forward, backward, ahead)}
    return frozenset(found[amounts] for amounts in _largest(found))


def _after_passes(vp: int, forward: Sequence[int], backward: Sequence[int], ahead: int) -> Iterator[PeakMoment]:
    """Stages of passes in their order; ``ahead`` forward passes precede the first backward pass."""
    held, begun = [0] * vp, [False] * vp
    for done in range(len(forward) + ahead):
        if done < len(forward):
            held[forward[done]] += 1
        coming = vp if done < len(forward) else sum(map(bool, held))
        gathered = min(coming, GATHERED)
        yield PeakMoment(tuple(held), tuple(begun), gathered, passes=True, adds=False)
        if done < ahead:
            continue
        stage = backward[done - ahead]
        held[stage] -= 1
        adds, begun[stage] = begun[stage], True
        yield PeakMoment(tuple(held), tuple(begun), gathered, passes=False, adds=adds)


def _largest(found: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those than which another is at least as large, at every place."""
    largest: list[tuple[int, ...]] = []
    for one in sorted(found, key=sum, reverse=True):
        if not any(all(map(ge, other, one)) for other in largest):
            largest.append(one)
    return largest

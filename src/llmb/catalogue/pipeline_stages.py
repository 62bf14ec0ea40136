# SPDX-License-Identifier: Apache-2.0
"""The layers of each pipeline stage. Pure."""

from itertools import accumulate, pairwise

from llmb.catalogue.records import Layout


def stage_layers(layout: Layout) -> list[range]:
    """The layers of every stage, in the order in which a token passes them.

    There are PP x VP stages of equal size, except for a first and a last stage whose size the layout may give. If the
    recipe counts the embedding and the loss as layers, the first and the last stage have one layer less.
    """
    stages = layout.pp * layout.vp
    if layout.pipeline_layers != layout.layers:
        equal = layout.pipeline_layers // stages
        sizes = [equal - 1, *[equal] * (stages - 2), equal - 1]
    else:
        first, last = given_sizes(layout)
        equal_stages = stages - len(first) - len(last)
        rest = layout.layers - sum(first) - sum(last)
        sizes = [*first, *[rest // max(1, equal_stages)] * equal_stages, *last]
    bounds = accumulate(sizes, initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def rank_stages(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The numbers of the stages of a pipeline rank: every PP-th stage."""
    return tuple(range(pp_rank, layout.pp * layout.vp, layout.pp))


def given_sizes(layout: Layout) -> tuple[list[int], list[int]]:
    """Layers of the first and of the last stage, each empty if the layout does not give them."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    return [first] if first is not None else [], [last] if last is not None else []

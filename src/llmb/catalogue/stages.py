# SPDX-License-Identifier: Apache-2.0
"""Which layers each pipeline stage holds. Pure."""

from itertools import accumulate, pairwise

from llmb.catalogue.records import Layout


def stage_layers(layout: Layout) -> list[range]:
    """Layers of every stage, in the order a token passes them; stage s is on pipeline rank s % PP.

    There are PP x VP stages of equal size. Where the recipe counts the embedding and the loss as layers, the first and
    the last stage hold one layer less.
    """
    stages = layout.pp * layout.vp
    sizes = [layout.pipeline_layers // stages] * stages
    if layout.pipeline_layers != layout.layers:
        sizes[0] -= 1
        sizes[-1] -= 1
    bounds = accumulate(sizes, initial=0)
    return [range(first, last) for first, last in pairwise(bounds)]

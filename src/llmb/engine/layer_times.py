# SPDX-License-Identifier: Apache-2.0
"""How long a rank computes in the forward passes of its layers, and how long it waits for them to begin.

A rank that is slower than others cannot be recognized by the times of its steps: all ranks wait for it in every
collective. Sharded parameters are gathered between layers, so that a layer's own time is the rank's own, except where
its computation is itself parallel (tensor, context, expert). Only a step's first micro-batch is timed: two moments a
layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from llmb.engine.device import Moment
from llmb.engine.model.decoder import Decoder

Span = tuple[Moment, Moment]


class LayerSeconds(NamedTuple):
    """One rank in one step. layer_s: mean of its layers. outside_s: before the first, and in gaps of a stage."""

    layer_s: float
    outside_s: float


class LayerTimes:
    """Times the layers of ``stages``, whose forward passes it wraps: after everything else that does."""

    def __init__(self, stages: Sequence[Decoder], device: torch.device) -> None:
        self.device = device
        self.sizes = [len(stage.layers) for stage in stages]
        self.begin()
        for number, stage in enumerate(stages):
            for block in stage.blocks():
                block.wrap("compute", partial(self._timing, number))

    def begin(self) -> None:
        """A step begins."""
        self.spans: list[list[Span]] = [[] for _ in self.sizes]

    def _timing(self, stage: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self._timed, stage, forward)

    def _timed(self, stage: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        spans = self.spans[stage]
        if len(spans) == self.sizes[stage]:
            return forward(*arguments, **options)
        began = Moment(self.device)
        result = forward(*arguments, **options)
        spans.append((began, Moment(self.device)))
        return result


def seconds_of(stages: Sequence[Sequence[Span]], began: Moment) -> LayerSeconds:
    """``began`` is the step's beginning. All moments must have passed."""
    own = [ended.seconds_since(start) for spans in stages for start, ended in spans]
    first = [spans[0][0].seconds_since(began) for spans in stages if spans]
    waits = [later[0].seconds_since(earlier[1]) for spans in stages for earlier, later in pairwise(spans)]
    return LayerSeconds(sum(own) / max(len(own), 1), min(first, default=0.0) + sum(waits))

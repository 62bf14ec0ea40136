# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that choose each routed expert: for ``metrics.jsonl`` by step, for a separate file by run."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import BalancedRouter, MoELayer, Router, count_choices
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.folder import write_atomically


def force_load_balancing(model: Decoder, ranks: Ranks) -> None:
    """Gives every expert the same number of tokens, with routers that ignore their logits."""
    place = ranks.rank % (ranks.world_size // ranks.mesh["pp"].size())
    for layer in moe_layers(model).values():
        layer.router = BalancedRouter(layer.router, place)


def set_capacity(model: Decoder, factor: float) -> None:
    """Gives every expert the same number of rows: an equal share of a rank's tokens, times ``factor``."""
    for layer in moe_layers(model).values():
        layer.capacity_factor = factor


def moe_layers(model: Decoder) -> dict[int, MoELayer]:
    """MoE layers by block number."""
    layers = {int(number): getattr(block, "mlp", None) for number, block in model.layers.items()}
    return {number: layer for number, layer in layers.items() if isinstance(layer, MoELayer)}


class ExpertLoadCounter:
    """Collects the counts of the layers of all ranks. Every rank has one, and calls it after the same steps."""

    def __init__(self, stages: Sequence[Decoder], ranks: Ranks) -> None:
        model, self.alone = stages[0].model, ranks.alone
        experts = model.moe.experts if model.moe else 0
        # The last column has those that are dropped, of all experts.
        self.columns = torch.zeros(model.layers, experts + 1, dtype=torch.int64, device=ranks.device)
        self.total = torch.zeros_like(self.columns)
        for stage in stages:
            for number, layer in moe_layers(stage).items():
                layer.router.register_forward_hook(partial(self._count, number, layer))

    def _count(
        self, number: int, layer: MoELayer, _router: Router, _inputs: object, choice: tuple[Tensor, Tensor]
    ) -> None:
        """Choices of this rank's tokens; with recomputation all of them count twice."""
        _, chosen = choice
        counts = count_choices(chosen, layer.moe.experts)
        self.columns[number, :-1] += counts
        capacity = layer.capacity(chosen.numel())
        if capacity is not None:
            self.columns[number, -1] += (counts - capacity).clamp(min=0).sum()

    def of_step(self) -> Tensor | None:
        """``summary`` of the load since the last call, over all ranks; None for a model without experts, and for a
        rank that is alone."""
        if self.columns.shape[1] == 1:
            return None
        dist.all_reduce(self.columns)
        self.total += self.columns
        load = summary(self.columns[:, :-1], self.columns[:, -1])
        self.columns.zero_()
        return None if self.alone else load

    def write(self, path: Path) -> None:
        """Each expert's fraction of the tokens of its layer, over all steps so far."""
        counts = self.total[:, :-1]
        shares = {number: (row.double() / row.sum()).tolist() for number, row in enumerate(counts) if row.any()}
        write_atomically(path, json.dumps({"share_of_tokens": shares}) + "\n")


def summary(counts: Tensor, dropped: Tensor) -> Tensor:
    """The fields of ``ExpertLoad``, [3] fp64, from tokens per expert, [layers, experts], and those dropped, [layers].

    Layers without tokens are left out. The result stays on the device.
    """
    used = counts.any(-1)
    rows = counts.double()
    max_over_mean = (rows.amax(-1) / rows.mean(-1)).where(used, 0.0).max()
    idle_experts = ((counts == 0) & used.unsqueeze(-1)).sum()
    dropped_share = dropped.sum().double() / counts.sum().clamp(min=1)
    return torch.stack((max_over_mean, idle_experts.double(), dropped_share))

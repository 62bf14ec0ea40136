# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens of each routed expert: per step for ``metrics.jsonl``, over the run for a separate file."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import Experts, MoELayer
from llmb.engine.model.routing import BalancedRouter
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.folder import write_atomically


def force_load_balancing(model: Decoder, ranks: Ranks) -> None:
    """Gives every expert the same number of tokens, with routers that ignore their logits."""
    place = ranks.rank % (ranks.world_size // ranks.mesh["pp"].size())
    for layer in moe_layers(model).values():
        layer.router = BalancedRouter(layer.router, place)


def moe_layers(model: Decoder) -> dict[int, MoELayer]:
    """MoE layers by block number."""
    layers = {int(number): getattr(block, "mlp", None) for number, block in model.layers.items()}
    return {number: layer for number, layer in layers.items() if isinstance(layer, MoELayer)}


class ExpertLoadCounter:
    """Collects the counts of the layers of all ranks. Every rank has one, and calls it after the same steps."""

    def __init__(self, stages: Sequence[Decoder], ranks: Ranks) -> None:
        model = stages[0].model
        experts = model.moe.experts if model.moe else 0
        self.counts = torch.zeros(model.layers, experts, dtype=torch.int64, device=ranks.device)
        self.total = torch.zeros_like(self.counts)
        for stage in stages:
            for number, layer in moe_layers(stage).items():
                layer.experts.register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, _experts: Experts, inputs: tuple[Tensor, Tensor]) -> None:
        """Rows of this rank for each expert; with recomputation all of them count twice."""
        self.counts[number] += inputs[1]

    def of_step(self) -> Tensor | None:
        """``summary`` of the load since the last call, over all ranks; None for a model without experts."""
        if not self.counts.numel():
            return None
        dist.all_reduce(self.counts)
        self.total += self.counts
        load = summary(self.counts)
        self.counts.zero_()
        return load

    def write(self, path: Path) -> None:
        """Each expert's fraction of the tokens of its layer, over all steps so far."""
        shares = {number: (row.double() / row.sum()).tolist() for number, row in enumerate(self.total) if row.any()}
        write_atomically(path, json.dumps({"share_of_tokens": shares}) + "\n")


def summary(counts: Tensor) -> Tensor:
    """The fields of ``ExpertLoad``, [2] fp64, from tokens per expert, [layers, experts].

    Layers without tokens are left out. The result stays on the device.
    """
    used = counts.any(-1)
    rows = counts.double()
    max_over_mean = (rows.amax(-1) / rows.mean(-1)).where(used, 0.0).max()
    idle_experts = ((counts == 0) & used.unsqueeze(-1)).sum()
    return torch.stack((max_over_mean, idle_experts.double()))

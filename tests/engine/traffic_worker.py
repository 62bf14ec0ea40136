# SPDX-License-Identifier: Apache-2.0
"""One of four ranks, EP2 x ETP2, whose experts have equally many rows: what they compute with and without knowing it.

Arguments: folder with room for the rendezvous, ``balanced`` or ``capacity``, rank. The first rank prints, as JSON, how
often it communicated without and with the knowledge, whether results and gradients were the same bit for bit on all
ranks, and how many products were computed during each exchange: dense ones, and those of experts by halves of tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import joined, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from llmb.catalogue.records import MixtureOfExperts
from llmb.engine.model.moe import BalancedRouter, MoELayer
from llmb.engine.parallel.expert_parallel import ParallelExperts, rank_places

MOE = MixtureOfExperts(
    router="sigmoid-scaled-inputs", experts=6, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=16, interleave=1
)


class Calls(TorchDispatchMode):
    """Names of operators, in order, and the memory of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        memory = result.untyped_storage().data_ptr() if name in ("all_to_all_single", "wait_tensor") else 0
        self.calls.append((name, memory))
        return result

    def during_exchanges(self, product: str) -> list[int]:
        """Products between the beginning and the end of each exchange of rows."""
        starts = [(place, memory) for place, (name, memory) in enumerate(self.calls) if name == "all_to_all_single"]
        ends = [self.calls.index(("wait_tensor", memory), start) for start, memory in starts]
        pairs = zip(starts, ends, strict=True)
        return [sum(name == product for name, _ in self.calls[start:end]) for (start, _), end in pairs]


def during_exchanges(layer: MoELayer, hidden: Tensor, product: str) -> list[list[int]]:
    """Forward and backward."""
    with Calls() as forward:
        result = layer(hidden)
    with Calls() as backward:
        result.square().sum().backward()
    return [forward.during_exchanges(product), backward.during_exchanges(product)]


def passes(layer: MoELayer, hidden: Tensor) -> tuple[int, list[Tensor]]:
    """Collectives of a forward pass, its result and the gradients of the experts."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        result = layer(hidden)
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in layer.experts.parameters()]
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    calls = sum(event.count for event in profiled.key_averages() if event.key.startswith("c10d::all"))
    return calls, [result.detach(), *parts]


def main(folder: Path, routing: str, rank: int) -> None:
    with joined(folder, rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
        torch.manual_seed(1)
        layer = MoELayer(16, MOE)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if routing == "balanced":
            layer.router = BalancedRouter(layer.router, rank)
        else:
            layer.capacity_factor = 1.25
        whole = layer.experts
        hidden = torch.randn(4, 1, 26, 16)[rank]  # 26 x 2 rows for 6 experts: no rank sends the same as another
        found = []
        for layer.parts in (1, 2) if routing == "balanced" else (1,):  # a half would have a capacity of its own
            for places in (None, rank_places(mesh, layer.router)):
                layer.experts = ParallelExperts(whole, mesh, MOE.experts, places)
                passes(layer, hidden)
                for parameter in layer.experts.parameters():
                    parameter.grad = None
                found.append(passes(layer, hidden))
        pairs = zip((values for _, values in found[::2]), (values for _, values in found[1::2]), strict=True)
        same = torch.tensor([all(map(torch.equal, *pair)) for pair in pairs])
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        for one, other in zip(found[0][1], found[-1][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        halves = during_exchanges(layer, hidden, "_grouped_mm")
        layer.parts = 1
        beside = []
        for layer.overlaps_dispatch in (False, True):
            beside += during_exchanges(layer, hidden, "mm")
        if rank == 0:
            collectives = [calls for calls, _ in found]
            print(json.dumps({"collectives": collectives, "same": same.tolist(), "beside": beside, "halves": halves}))


run(main)

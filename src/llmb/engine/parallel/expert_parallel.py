# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism (Lepikhin et al., 2021), and expert tensor parallelism as in Megatron-LM: ranks exchange
tokens."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmb.engine.collectives import Group, all_gather, all_to_all, finish_all_to_all, group_of, start_all_to_all
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import BalancedRouter, Experts, MoELayer, Router, Sent, balanced_counts, permute

EXPERT = 0
FEATURE = {"gate_up_proj": 3, "down_proj": 1}
"""The dimension of the experts' inner features in each stacked matrix."""


def apply_expert_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Distribute the routed experts of ``model`` in place over the ranks of ``mesh``, with dimensions ep and etp."""
    if mesh.size() == 1:
        return
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        places = rank_places(mesh, layer.router) if layer.balances else None
        layer.experts = ParallelExperts(layer.experts, mesh, layer.moe.experts, places)


def rank_places(mesh: DeviceMesh, router: Router) -> Tensor:
    """Return the ranks' places in the round-robin choice of experts, [ep, etp]; with a capacity, they do not matter."""
    own = router.place if isinstance(router, BalancedRouter) else mesh.get_rank()
    return mesh.mesh.cpu() - (mesh.get_rank() - own)


class Dispatch(NamedTuple):
    """The exchange of rows with other ranks, to the experts and back."""

    ep: Group
    etp: Group
    sent: list[int]
    """Number of rows to each rank of ``ep``."""
    received: list[int]
    """Number of rows from each rank of ``ep``."""
    gathered: list[int]
    """Number of rows that each rank of ``etp`` received."""
    order: Tensor
    """Permutation of gathered rows, which are ordered by rank, into the order of experts."""
    back: Tensor
    """Inverse of ``order``."""
    counts: Tensor
    """Number of gathered rows of each expert on this rank."""
    host_counts: list[int]

    def on(self, device: torch.device) -> "Dispatch":
        order, back, counts = (each.to(device) for each in (self.order, self.back, self.counts))
        return self._replace(order=order, back=back, counts=counts)

    def send(self, rows: Tensor) -> Sent:
        """Begin to send this rank's rows, which are ordered by expert."""
        started = start_all_to_all(rows, self.sent, self.received, self.ep)
        arrive = partial(self.arrive, start=started.grad_fn)
        return Sent(started, self.counts, self.host_counts, arrive, self.receive, finish_all_to_all)

    def arrive(self, started: Tensor, start: object) -> Tensor:
        """Wait for rows; return all ranks' rows for this rank's experts, ordered by expert."""
        arrived = finish_all_to_all(started, start)
        if self.etp.size > 1:  # shards are uneven, so each rank sends its own to all
            copies = [len(arrived)] * self.etp.size
            arrived = all_to_all(arrived.repeat(self.etp.size, 1), copies, self.gathered, self.etp)
        return permute(arrived, self.order, self.back)

    def receive(self, outputs: Tensor) -> Tensor:
        """Begin to send outputs back to the ranks of their rows."""
        outputs = permute(outputs, self.back, self.order)
        if self.etp.size > 1:  # sums of parts
            copies = [sum(self.received)] * self.etp.size
            parts = all_to_all(outputs, self.gathered, copies, self.etp)
            outputs = parts.view(self.etp.size, copies[0], parts.shape[-1]).sum(0)
        return start_all_to_all(outputs, self.received, self.sent, self.ep)


class ParallelExperts(Experts):
    """Experts on several ranks, which exchange rows. ``places``: [ep, etp]; None if numbers of rows depend on the
    tokens."""

    def __init__(self, full: Experts, mesh: DeviceMesh, experts: int, places: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        for name, parameter in full.named_parameters(recurse=False):
            placements = [Shard(EXPERT), Shard(FEATURE[name])]
            self.register_parameter(
                name, nn.Parameter(distribute_tensor(parameter, mesh, placements, src_data_rank=None))
            )
        self.activate, self.products = full.activate, full.products
        self.ep = group_of(mesh["ep"])
        self.etp = group_of(mesh["etp"])
        self.experts = experts
        self.places = places
        self.balanced: dict[tuple[int, int, torch.device], list[Dispatch]] = {}

    def send(self, parts: Sequence[Sent]) -> list[Sent]:
        counts = torch.stack([part.counts for part in parts])
        plans = self.counted(counts) if self.places is None else self.balance(self.places, parts)
        return [plan.send(part.rows) for plan, part in zip(plans, parts, strict=True)]

    def counted(self, counts: Tensor) -> list[Dispatch]:
        """Gather all ranks' numbers of rows for each expert, here [parts, experts]; plan the exchanges of rows."""
        by_etp = all_gather(all_gather(counts.unsqueeze(0), 0, self.ep).unsqueeze(0), 0, self.etp)
        if self.on_rows:
            self.on_rows(by_etp.view(-1, self.ep.size, self.experts // self.ep.size).sum((0, 2)))
        return plan_dispatch(by_etp, self.ep, self.etp)

    def balance(self, places: Tensor, parts: Sequence[Sent]) -> list[Dispatch]:
        """Return the exchanges of equal parts whose experts follow from ``places``, planned once per number of rows."""
        rows, device, number = len(parts[0].rows), parts[0].rows.device, len(parts)
        if (rows, number, device) not in self.balanced:
            firsts = (places.T.unsqueeze(-1) * number + torch.arange(number)).flatten().tolist()
            counts = torch.tensor([balanced_counts(first, rows, self.experts) for first in firsts])
            on_host = plan_dispatch(counts.view(self.etp.size, self.ep.size, number, -1), self.ep, self.etp)
            self.balanced[rows, number, device] = [plan.on(device) for plan in on_host]
        return self.balanced[rows, number, device]


def plan_dispatch(by_etp: Tensor, ep: Group, etp: Group) -> list[Dispatch]:
    """Plan the exchange of each part from [etp, ep, parts, experts] numbers of rows; wait for their device."""
    # [etp, ep, parts, experts of all] -> [parts, etp, ep, owner, experts of the owner]
    blocks = by_etp.unflatten(-1, (ep.size, -1)).movedim(2, 0)
    mine = blocks[:, :, :, ep.rank]
    counts = mine.sum((1, 2))
    sizes = blocks[:, etp.rank, ep.rank].sum(-1), mine[:, etp.rank].sum(-1), mine.sum((2, 3)), counts
    on_host = torch.cat(sizes, 1).tolist()
    return [_plan_part(ep, etp, *part) for part in zip(mine, counts, on_host, strict=True)]


def _plan_part(ep: Group, etp: Group, mine: Tensor, counts: Tensor, on_host: list[int]) -> Dispatch:
    sent, received, gathered, host_counts = _split(on_host, ep.size, ep.size, etp.size)
    expert = torch.arange(mine.shape[-1], device=mine.device).expand_as(mine)
    by_rank = torch.repeat_interleave(expert.flatten(), mine.flatten(), output_size=sum(gathered))
    order = by_rank.argsort(stable=True)
    return Dispatch(ep, etp, sent, received, gathered, order, order.argsort(), counts, host_counts)


def _split(numbers: list[int], *sizes: int) -> list[list[int]]:
    ends = [0, *accumulate(sizes), len(numbers)]
    return [numbers[start:end] for start, end in pairwise(ends)]

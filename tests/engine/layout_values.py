# SPDX-License-Identifier: Apache-2.0
"""What the reference and the ranks of a layout do alike: starting values, and how far results lie apart."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from ranks import whole
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from llmb.engine.collectives import all_reduce
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import local_tensor, sharded_like
from llmb.engine.parallel.exchange import TrainedStage


@torch.no_grad()
def spread(model: Decoder) -> None:
    """Moves norms away from the identity, and adapters' outputs from zero, where some mistakes would not show."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "adapter.b." not in name:
            continue
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        # Adapters' outputs are then about as large as the layers': larger ones would amplify rounding.
        # So would biases: what they add to all keys cancels in the gradients of queries.
        scale = 0.2 if parameter.ndim == 1 and "_bias." not in name else 0.02
        values = scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local()
            parameter.to_local().add_(values)
        else:
            parameter.add_(values)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative; an expert without tokens has a gradient of zero."""
    size = float(theirs.norm())
    return float((ours - theirs).norm()) / (size or 1.0)


def gradients(stages: Iterable[TrainedStage]) -> dict[str, Tensor]:
    """Full ones of all trained parameters, also where this rank updates a part of them. A collective."""
    return {name: whole(each) for stage in stages for name, each in held_gradients(stage)}


def held_gradients(stage: TrainedStage) -> Iterator[tuple[str, Tensor]]:
    groups = {each: bucket.peers.pieces for bucket in stage.buckets for each in bucket.parameters if bucket.parts}
    parts = {each.name: each.part for each in stage.held() if each.part is not None}
    for name, parameter in stage.model.named_parameters():
        if parameter not in groups:
            if parameter.grad is not None:
                yield name, parameter.grad
            continue
        part, dtype = parts.get(name), next(one.gradient.dtype for one in parts.values())
        local = torch.zeros_like(local_tensor(parameter.detach()), dtype=dtype)
        if part is not None:
            local.view(-1)[part.start : part.stop] = part.gradient
        yield name, sharded_like(parameter, all_reduce(local, "sum", groups[parameter]))


def mean_loss(own: Tensor | None) -> float:
    """Of all ranks that have one."""
    losses = torch.tensor([0.0, 0.0] if own is None else [1.0, own.item()], dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses[1] / losses[0]).item()

# SPDX-License-Identifier: Apache-2.0
"""What the reference and the ranks of a layout do alike: starting values, and how far results lie apart."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from llmb.engine.model.decoder import Decoder


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


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_loss(own: Tensor | None) -> float:
    """Of all ranks that have one."""
    losses = torch.tensor([0.0, 0.0] if own is None else [1.0, own.item()], dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses[1] / losses[0]).item()

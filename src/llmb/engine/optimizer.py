# SPDX-License-Identifier: Apache-2.0
"""AdamW with linear warm-up and cosine decay, as in the recipes."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from llmb.catalogue.records import Training
from llmb.engine.model.local_shard import local_tensor

SMALLEST_NORM = 1e-6
"""Added to a norm before dividing by it, as in torch."""


class FusedAdamW(AdamW):
    """AdamW in one pass over memory, which divides gradients by ``grad_scale``, 0-d fp32, if that is set."""

    grad_scale: Tensor | None = None


def build_optimizer(model: nn.Module, training: Training) -> FusedAdamW:
    """For all parameters that are not frozen. Applies weight decay only to matrices, not to norm weights and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": list(group), "weight_decay": training.weight_decay if group[0].ndim > 1 else 0.0}
        for group in alike(parameters)
    ]
    betas = (training.beta1, training.beta2)
    return FusedAdamW(groups, lr=training.peak_lr, betas=betas, eps=training.eps, fused=True)


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Separates matrices from vectors, and meshes: torch cannot update parameters of several meshes together."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return list(groups.values())


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to the minimum; steps count from 0."""
    if step < training.warmup_steps:
        return training.peak_lr * (step + 1) / (training.warmup_steps + 1)
    span = max(1, training.decay_steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / span)
    return training.min_lr + (training.peak_lr - training.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], optimizers: Iterable[FusedAdamW], largest_norm: float) -> Tensor:
    """Clips gradients of ``parameters`` to ``largest_norm`` over all ranks, by scaling in the next step. A collective.

    Returns the norm before clipping, 0-d fp64.
    """
    norm = gradient_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    scale = ((norm + SMALLEST_NORM) / largest_norm).clamp(min=1.0).float()
    for optimizer in optimizers:
        optimizer.grad_scale = scale
    return norm


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all ranks, each element counted once even if several ranks hold it; 0-d fp64.

    In fp64, because in fp32 the fifth digit of a large gradient's sum of squares depends on how it is sharded.
    """
    norms = torch._foreach_norm([local_tensor(gradient) for gradient in gradients], 2.0, torch.float64)
    # Numbers, not a tensor: a tensor would be copied from the host, which waits for all queued work.
    squares = torch._foreach_div(torch._foreach_pow(norms, 2.0), [float(ranks_with_a_copy(g)) for g in gradients])
    total = torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def ranks_with_a_copy(tensor: Tensor) -> int:
    """The number of ranks of its mesh that hold the same shard of a tensor as this one."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def reproducible(seed: int) -> None:
    """Seeds all random number generators except those for data and initial weights, which have their own."""
    torch.manual_seed(seed)

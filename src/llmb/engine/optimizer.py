# SPDX-License-Identifier: Apache-2.0
"""AdamW with warm-up and cosine schedule, as the recipes train."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from llmb.catalogue.records import Training


def build_optimizer(model: nn.Module, training: Training) -> AdamW:
    """Weight decay on matrices only; norm weights and biases keep their scale."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    on_gpu = parameters[0].device.type == "cuda"
    betas = (training.beta1, training.beta2)
    return AdamW(groups, lr=training.peak_lr, betas=betas, eps=training.eps, fused=on_gpu, foreach=not on_gpu)


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


def clip_gradients(stages: Sequence[nn.Module], largest_norm: float, pp: DeviceMesh | None = None) -> Tensor:
    """Scales gradients down to ``largest_norm`` over all ranks and pipeline stages; the 0-d norm before clipping."""
    parameters = [parameter for stage in stages for parameter in stage.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if pp is not None and pp.size() > 1:
        squares = whole.square()
        dist.all_reduce(squares, group=pp.get_group())
        whole = squares.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, whole)
    return whole


def reproducible(seed: int) -> None:
    """Seeds what draws random numbers outside of data and initial values, which carry their own."""
    torch.manual_seed(seed)

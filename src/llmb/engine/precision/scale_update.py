# SPDX-License-Identifier: Apache-2.0
"""Updates the scales of FP8 layers in each step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.exchange import OwnPart
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.apply import drop_kept, fp8_layers
from llmb.engine.precision.experts import Fp8Stack
from llmb.engine.precision.fp8_layers import Fp8Linear
from llmb.engine.precision.scaling import WEIGHT
from llmb.runs.plan import Plan


@contextmanager
def fp8_step(stages: Sequence[Decoder], number: int) -> Iterator[None]:
    """Around the passes of a step: largest values of weights before, scales of all tensors after.

    Frozen weights are measured once, and what is cast of them is kept.
    """
    layers = fp8_layers(stages)
    if not layers:
        yield
        return
    scales = layers[0].layer_scales.scales
    frozen = not any(layer.weight.requires_grad for layer in layers)
    if frozen and scales.frozen_weights is None:
        amax = weight_amax([layer.weight for layer in layers])
        reduce_largest(amax, scales.group)
        scales.freeze_weights(amax)
    if scales.frozen_weights is not None:
        scales.amax[:, WEIGHT] = scales.frozen_weights
    else:
        scales.amax[:, WEIGHT] = weight_amax(own_weights(stages, layers))
        if not scales.delayed:
            amax = scales.amax[:, WEIGHT].contiguous()
            reduce_largest(amax, scales.group)
            scales.set_weights(amax)
    scales.use()
    yield
    if not frozen:
        drop_kept(stages)
    reduce_largest(scales.amax, scales.group)
    scales.finish(number)


def own_weights(stages: Sequence[Decoder], layers: Sequence[Fp8Linear | Fp8Stack]) -> list[Tensor]:
    """The weights of layers. Of those that ranks update in parts this rank's: the others may still be on their way."""
    held: dict[Tensor, OwnPart | None] = {each.parameter: each.part for stage in stages for each in stage.memory.held()}
    weights: list[Tensor] = []
    for weight in (layer.weight for layer in layers):
        part = held.get(weight)
        if part is not None:
            weights.append(part.values if part.weight is None else part.weight)
        else:
            weights.append(weight if weight in held else weight.new_empty(0))
    return weights


@torch.no_grad()
def weight_amax(weights: Sequence[Tensor]) -> Tensor:
    """Largest absolute values of this rank's shards of fp32 or bf16 weights, rounded to bf16: [weights] fp32."""
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    # A rank may hold no part of a small weight.
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]
    # Rounding preserves order, so the largest rounded value is the rounded largest value.
    return torch.stack(torch._foreach_norm(parts, torch.inf)).bfloat16().float()


def reduce_largest(amax: Tensor, group: dist.ProcessGroup) -> None:
    """Reduces in place over the ranks of a group. NaN becomes infinity, because a maximum may ignore it."""
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)


def fp8_counts(plan: Plan, stages: Sequence[nn.Module], ranks: Ranks) -> Tensor | None:
    """The fields of ``Fp8Counts`` of the last step and the full model, [2] fp64; None without FP8 or other ranks.

    A collective of all ranks. Stays on the device.
    """
    if plan.fp8_recipe is None or ranks.alone:
        return None
    layers = fp8_layers(stages)
    counts = (
        layers[0].layer_scales.scales.counts.clone()
        if layers
        else torch.zeros(2, dtype=torch.int64, device=ranks.device)
    )
    dist.all_reduce(counts)
    # The ranks of a pipeline stage have equal counts.
    return (counts // (ranks.world_size // ranks.mesh["pp"].size())).double()


FP8 = "fp8."


def scale_state(stage: nn.Module) -> dict[str, Tensor]:
    """The scales and histories of a stage's layers, not copied, equal on all its ranks; empty with current scaling."""
    return {
        f"{FP8}{name}.{kind}": tensor
        for name, layer in stage.named_modules()
        if isinstance(layer, Fp8Linear | Fp8Stack) and layer.layer_scales.scales.delayed
        for kind, tensor in (("scale", layer.layer_scales.scale), ("history", layer.layer_scales.history))
    }

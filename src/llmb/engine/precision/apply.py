# SPDX-License-Identifier: Apache-2.0
"""Puts a model's layers into FP8, and brings their scales from step to step."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.local import Linear
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.linear import Fp8Linear, Place
from llmb.engine.precision.scaling import LARGEST, WEIGHT, Scales, scale_from
from llmb.errors import EnvironmentProblem
from llmb.runs.plan import Plan

CAPABILITY = (8, 9)
"""Of the first GPUs that multiply FP8 matrices."""


def apply_fp8(stages: Sequence[Decoder], plan: Plan, ranks: Ranks, *, keep_weights: bool) -> None:
    """Replaces, in place, the matrices of attention and feed-forward layers, before anything else cuts them.

    ``keep_weights`` keeps cast weights over a step: for parameters that stay whole as long. Raises EnvironmentProblem
    where the device has no FP8 and emulation was not asked for.
    """
    if plan.fp8_recipe is None:
        return
    if not plan.emulate_fp8:
        check_device(ranks.device)
    group = ranks.mesh["dp", "cp", "tp"]._flatten("stage").get_group()
    found = [(block, name) for stage in stages for block in fp8_blocks(stage, plan) for name in linears(block)]
    scales = Scales(len(found), ranks.device, group, delayed=plan.fp8_recipe == "delayed")
    for number, (block, name) in enumerate(found):
        whole = block.get_submodule(name)
        assert isinstance(whole, Linear)
        block.set_submodule(name, Fp8Linear(whole, Place(scales, number), emulated=plan.emulate_fp8))
    for block in {id(block): block for block, _ in found}.values() if keep_weights else ():
        block.register_forward_pre_hook(_keep_weights)


def check_device(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY
    if capability < CAPABILITY:
        found = ".".join(map(str, capability))
        raise EnvironmentProblem(
            f"{torch.cuda.get_device_name(device)} has no FP8: its compute capability is {found}, 8.9 is needed",
            do="train with --dtype bf16, or add --emulate-fp8",
        )


def fp8_blocks(stage: Decoder, plan: Plan) -> list[nn.Module]:
    """All; current scaling leaves the first and the last one of the whole model in bf16."""
    ends = () if plan.fp8_recipe == "delayed" else (0, stage.model.layers - 1)
    return [block for number, block in stage.layers.items() if int(number) not in ends]


def linears(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if isinstance(module, Linear)]


def _keep_weights(block: nn.Module, _inputs: object) -> None:
    """Before a block, whose parameters have been gathered by then, and outside of what is compiled."""
    for layer in fp8_layers([block]):
        layer.keep_weight()


def fp8_layers(modules: Iterable[nn.Module]) -> list[Fp8Linear]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, Fp8Linear)]


@contextmanager
def fp8_step(stages: Sequence[Decoder], number: int) -> Iterator[None]:
    """Around the passes of a step: weights' largest values before, everybody's scales after."""
    layers = fp8_layers(stages)
    if not layers:
        yield
        return
    scales = layers[0].place.scales
    scales.amax[:, WEIGHT] = weight_amax(layers)
    if not scales.delayed:
        amax = scales.amax[:, WEIGHT].contiguous()
        everybodys_largest(amax, scales.group)
        scales.scale[:, WEIGHT] = scale_from(amax, LARGEST[WEIGHT], 1.0)
    yield
    for layer in layers:
        layer.kept = None
    everybodys_largest(scales.amax, scales.group)
    scales.finish(number)


def everybodys_largest(amax: Tensor, group: dist.ProcessGroup) -> None:
    """In place, over the ranks of a group. What is not a number becomes infinite: it is the largest for nobody."""
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)


@torch.no_grad()
def weight_amax(layers: Sequence[Fp8Linear]) -> Tensor:
    """Largest absolute values of this rank's parts of the weights as they are computed with, [layers] fp32."""
    parts = [part.to_local() if isinstance(part := layer.weight, DTensor) else part for layer in layers]
    # A rank may have no part of a small weight.
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]
    # Rounding keeps the order, so that the largest of the rounded is the largest one rounded.
    return torch.stack(torch._foreach_norm(parts, torch.inf)).bfloat16().float()


def counts_of_step(stages: Sequence[Decoder], ranks: Ranks) -> tuple[int, int]:
    """Tensors of the whole model that the last step saturated, and in which it met what is not finite.

    A collective, which ranks of all pipeline stages have to call.
    """
    layers = fp8_layers(stages)
    counts = layers[0].place.scales.counts.clone() if layers else torch.zeros(2, dtype=torch.int64, device=ranks.device)
    dist.all_reduce(counts)
    saturated, not_finite = (counts // (ranks.world_size // ranks.pp.size())).tolist()
    return saturated, not_finite

# SPDX-License-Identifier: Apache-2.0
"""Converts layers of a model to FP8, and updates their scales in each step."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.base.errors import EnvironmentProblem
from llmb.engine.kernels.elementwise import CAPABILITY
from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Block, Decoder
from llmb.engine.model.layers import GatedMLP, SquaredReluMLP
from llmb.engine.model.linear import Joined, Linear, joined_layers
from llmb.engine.model.moe import Experts
from llmb.engine.parallel.exchange import RankPart, TrainedStage
from llmb.engine.parallel.mesh import DIMENSIONS, Ranks, as_one
from llmb.engine.precision.experts import Fp8Stack, fp8_products, fused_fp8_products
from llmb.engine.precision.fp8_layers import (
    Fp8GatedMLP,
    Fp8Joined,
    Fp8Linear,
    Fp8SquaredReluMLP,
    RotatedAttention,
    only_rotates,
)
from llmb.engine.precision.scaling import WEIGHT, LayerScales, Scales
from llmb.runs.attention_choice import ProductDtype, fp8_product
from llmb.runs.plan import EnginePlan, Plan


def apply_fp8(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    """Convert attention and feed-forward layers to FP8, if planned, between expert and tensor parallelism. Raise
    EnvironmentProblem if unsupported."""
    if plan.fp8_recipe is None:
        return
    product_dtype = fp8_product(plan.device, emulate=plan.emulate_fp8).dtype
    if product_dtype == "fp8" and ranks.device.type == "cuda":
        check_device(ranks.device)
    group = as_one(ranks.mesh, *DIMENSIONS[1:]).get_group()
    blocks = [block for stage in stages for block in fp8_blocks(stage, plan)]
    layers = [layer for block in blocks for layer in layers_of(block)]
    keys = [layer.shares for layer in layers]
    leaders = [keys.index(key) for key in keys]
    scales = Scales(len(layers), ranks.device, group, delayed=plan.fp8_recipe == "delayed", leaders=leaders)
    for number, layer in enumerate(layers):
        layer.replace(LayerScales(scales, number), product_dtype)
    path = plan.compute_path
    for block in blocks:
        join_casts(block)
        if path.casts_attention_again:
            cast_attention_again(block)
    for stage in stages if path.fuses_casts else ():
        fuse_activations(stage)
        fuse_rotation(stage)
    for stack in fp8_layers(blocks) if path.groups_experts else ():
        if isinstance(stack, Fp8Stack):
            stack.groups = True
    for block in blocks if path.keeps_gathered else ():
        keep_from_forward_on(block)


def check_device(device: torch.device) -> None:
    """Raise EnvironmentProblem for a GPU without FP8."""
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        version = ".".join(map(str, capability))
        raise EnvironmentProblem(
            f"{torch.cuda.get_device_name(device)} does not support FP8: its compute capability {version} is below 8.9",
            do="train with --dtype bf16, or add --emulate-fp8",
        )


def fp8_blocks(stage: Decoder, plan: EnginePlan) -> list[Block]:
    """Return the blocks to convert: all or, with the recipe ``current``, all but the model's first and last."""
    ends = (0, stage.model.layers - 1) if plan.fp8_recipe == "current" else ()
    return [stage.block(number) for number in stage.layers if int(number) not in ends]


class Layer(NamedTuple):
    """One matrix or stack of matrices to compute in FP8; layers that share scales have an equal ``shares``."""

    shares: tuple[int, str]
    owner: nn.Module
    name: str

    def replace(self, layer_scales: LayerScales, product_dtype: ProductDtype) -> None:
        owner, name = self.owner, self.name
        if isinstance(owner, Experts):
            owner.add_module(f"{name}_product", Fp8Stack(owner, name, layer_scales, product_dtype=product_dtype))
            owner.products = fp8_products
        else:
            whole = owner.get_submodule(name)
            assert isinstance(whole, Linear)
            owner.add_module(name, Fp8Linear(whole, layer_scales, product_dtype=product_dtype))


def layers_of(block: nn.Module) -> Iterator[Layer]:
    for module in block.modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters(recurse=False):
                yield Layer((id(module), name), module, name)
        else:
            joined = {name: each.names[0] for each in joined_of(module).values() for name in each.names}
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    yield Layer((id(module), joined.get(name, name)), module, name)


def joined_of(module: nn.Module) -> dict[str, Joined]:
    """Return the ``Joined`` attributes of a module, by name."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Joined)}


def join_casts(block: nn.Module) -> None:
    """Make all ``Joined`` layers cast their common input once, and multiply it by one joint matrix."""
    for module in block.modules():
        for name, joined in joined_of(module).items():
            setattr(module, name, Fp8Joined(module, *joined.names))


def cast_attention_again(block: nn.Module) -> None:
    """Make output projections cast their input again in the backward pass, instead of saving the cast."""
    for module in block.modules():
        if isinstance(module, Attention) and isinstance(module.o_proj, Fp8Linear):
            module.o_proj.casts_again = True


def fuse_activations(stage: nn.Module) -> None:
    """Make experts, and MLPs without biases, cast the results of activations without storing them in bf16."""
    for module in stage.modules():
        if isinstance(module, Experts):
            module.products = fused_fp8_products
        elif type(module) is GatedMLP and not module.biased:
            module.__class__ = Fp8GatedMLP
        elif type(module) is SquaredReluMLP and not module.biased:
            module.__class__ = Fp8SquaredReluMLP


def fuse_rotation(stage: nn.Module) -> None:
    """Make attention cast gradients as it rotates them back, in layers that ``only_rotates`` selects."""
    for module in stage.modules():
        if type(module) is Attention and only_rotates(module):
            module.__class__ = RotatedAttention


def keep_from_forward_on(block: Block) -> None:
    """Make ``block`` and its routed experts each cast their weights once per step, before their forward passes."""
    block.kept = [layer for layer in caching_layers(block) if not isinstance(layer, Fp8Stack)]
    for module in block.modules():
        if isinstance(module, Experts):
            module.kept = fp8_layers([module])


def caching_layers(block: nn.Module) -> list[Fp8Linear | Fp8Joined | Fp8Stack]:
    """Return the layers of a block or a stage that keep cast weights; joined layers count as one."""
    joined = [each for each in joined_layers(block) if isinstance(each, Fp8Joined)]
    together = {id(layer) for each in joined for layer in each.layers}
    return [*joined, *(layer for layer in fp8_layers([block]) if id(layer) not in together)]


def drop_cast_weights(stages: Iterable[nn.Module]) -> None:
    """Drop all cast weights after the passes of a step, because the weights change."""
    for stage in stages:
        for layer in (*fp8_layers([stage]), *caching_layers(stage)):
            layer.kept = None


def fp8_layers(modules: Iterable[nn.Module]) -> list[Fp8Linear | Fp8Stack]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, Fp8Linear | Fp8Stack)]


@contextmanager
def fp8_step(stages: Sequence[TrainedStage], number: int) -> Iterator[None]:
    """Measure weights before a step's passes, and set scales: current ones before, delayed ones after the passes."""
    layers = fp8_layers(stage.model for stage in stages)
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
        scales.amax[:, WEIGHT] = weight_amax(rank_weights(stages, layers))
        if not scales.delayed:
            amax = scales.amax[:, WEIGHT].contiguous()
            reduce_largest(amax, scales.group)
            scales.set_weights(amax)
    scales.use()
    yield
    if not frozen:
        drop_cast_weights(stage.model for stage in stages)
    reduce_largest(scales.amax, scales.group)
    scales.finish(number)


def rank_weights(stages: Sequence[TrainedStage], layers: Sequence[Fp8Linear | Fp8Stack]) -> list[Tensor]:
    """Return the layers' weights, or only the parts that this rank updates: other parts may still be in transit."""
    held: dict[Tensor, RankPart | None] = {each.parameter: each.part for one in stages for each in one.held()}
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
    """Return the largest absolute values of this rank's shards, rounded to bf16: [weights] fp32."""
    parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    # A rank may hold no part of a small weight.
    parts = [part if part.numel() else part.new_zeros(1) for part in parts]
    # Rounding preserves order, so the largest rounded value is the rounded largest value.
    return torch.stack(torch._foreach_norm(parts, torch.inf)).bfloat16().float()


def reduce_largest(amax: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce the maximum in place. NaN is replaced by infinity, because a maximum may ignore NaN."""
    amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)


def fp8_counts(plan: Plan, stages: Sequence[nn.Module], ranks: Ranks) -> Tensor | None:
    """Return the last step's fields of ``Fp8Counts``, [2] fp64 on the device; None without FP8 or other ranks. A
    collective."""
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
    """Return the scales and histories of a stage's layers by name, not copied; empty with current scaling."""
    return {
        f"{FP8}{name}.{kind}": tensor
        for name, layer in stage.named_modules()
        if isinstance(layer, Fp8Linear | Fp8Stack) and layer.layer_scales.scales.delayed
        for kind, tensor in (("scale", layer.layer_scales.scale), ("history", layer.layer_scales.history))
    }

# SPDX-License-Identifier: Apache-2.0
"""Prepares this rank's stages of the model for training: transforms them, allocates memory, sets initial weights."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llmb.engine.collectives import Group
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import (
    GradientSum,
    Joined,
    Linear,
    is_plain,
    join_products,
    joined_layers,
    local_tensor,
    sharded_like,
)
from llmb.engine.model.moe import Experts
from llmb.engine.parallel.data_parallel import compute_dtype, reduce_dtype
from llmb.engine.parallel.exchange import (
    Bucket,
    Peers,
    Reduction,
    TrainedStage,
    Unit,
    enter,
    padded_size,
    sizes_of,
    split_flat,
)
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_stages
from llmb.engine.transformations import INDUCTOR, CompilerBackend, transform
from llmb.runs.plan import EnginePlan


def prepare_stages(plan: EnginePlan, ranks: Ranks, backend: CompilerBackend = INDUCTOR) -> list[TrainedStage]:
    """Return this rank's pipeline stages with initial weights: one, or several with virtual pipeline parallelism."""
    stages = give_memory(shape_stages(plan, ranks, backend), plan, ranks)
    for stage in stages:
        stage.initialize(plan.seed)
    return stages


def shape_stages(plan: EnginePlan, ranks: Ranks, backend: CompilerBackend = INDUCTOR) -> list[Decoder]:
    """Return this rank's stages on the meta device, transformed as the plan requires."""
    with torch.device("meta"):
        stages = build_stages(plan.recipe.model, plan.recipe.layout, ranks.pp_rank)
    transform(stages, plan, ranks, backend)
    return stages


def give_memory(models: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> list[TrainedStage]:
    """Allocate uninitialized parameters for stages on the meta device; without FSDP, set up products and gradients."""
    path, several, stages = plan.compute_path, plan.recipe.layout.ga > 1, list(map(TrainedStage, models))
    if path.shards_parameters:
        for model in models:
            model.to_empty(device=ranks.device)
        return stages
    exchange = exchange_of(ranks, reduce_dtype(plan)) if path.exchanges_updates else None
    place_parameters(stages, compute_dtype(plan.recipe.dtype), ranks.device, exchange)
    if path.joins_products:
        join_products(models, adjacent_weights)
    if path.gradient_sums == "after the product" and (several or exchange):
        # This also permits the exchange to assign fp32 means as gradients of bf16 parameters.
        accumulate_in_fp32(models)
    elif path.gradient_sums == "by the product" and several:
        sum_in_products(stages)
    if exchange:
        overlap_exchange(stages)
    return stages


class Exchange(NamedTuple):
    """The ranks that hold the same parameters. experts: for routed experts. dense: for all other parameters."""

    dense: Peers
    experts: Peers


def exchange_of(ranks: Ranks, dtype: torch.dtype) -> Exchange:
    """Return the ranks to exchange gradients and updates with. Gradients are summed over ranks in ``dtype``."""

    def group(mesh: DeviceMesh, dim: int) -> Group | None:
        if mesh.size(dim) == 1:
            return None
        return Group(mesh.get_group(dim).group_name, mesh.size(dim), mesh.get_local_rank(dim))

    def peers(mesh: DeviceMesh) -> Peers:
        replicas = group(mesh, 0) if mesh.ndim == 2 else None
        return Peers(group(mesh, mesh.ndim - 1), replicas, ranks.fsdp.size(), dtype)

    return Exchange(peers(ranks.fsdp), peers(ranks.expert_fsdp))


def place_parameters(
    stages: Sequence[TrainedStage], dtype: torch.dtype, device: torch.device, exchange: Exchange | None = None
) -> None:
    """Replace meta parameters with uninitialized ones in flat buffers, so that weights of adjacent layers form one
    matrix."""
    for stage in stages:
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for layer, peers, group in parameter_groups(stage.model, exchange):
            for (of_kind, trained), parameters in kinds(group, dtype).items():
                pieces = peers.parts if peers and trained else 1
                flat = empty(parameters, of_kind, device, pieces)
                new = [nn.Parameter(view, requires_grad=trained) for view in views(parameters, flat)]
                placed |= dict(zip(parameters, new, strict=True))
                if peers and trained:
                    stage.buckets.append(Bucket(new, flat, peers, layer))
                if trained and of_kind is not torch.float32 and pieces == 1:
                    masters = views(parameters, empty(parameters, torch.float32, device))
                    stage.masters |= dict(zip(new, masters, strict=True))
        for module in stage.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, placed[parameter])


class ParameterGroup(NamedTuple):
    """Parameters with separate buffers. layer: the name of their block, if any. peers: the ranks to exchange with."""

    layer: str | None
    peers: Peers | None
    parameters: list[nn.Parameter]


def parameter_groups(stage: Decoder, exchange: Exchange | None) -> Iterator[ParameterGroup]:
    if exchange is None:
        yield ParameterGroup(None, None, list(stage.parameters()))
        return
    within = {parameter for block in stage.layers.values() for parameter in block.parameters()}
    yield ParameterGroup(
        None, exchange.dense, [parameter for parameter in stage.parameters() if parameter not in within]
    )
    for layer, block in stage.layers.items():
        routed = {one: None for module in block.modules() if isinstance(module, Experts) for one in module.parameters()}
        yield ParameterGroup(
            layer, exchange.dense, [parameter for parameter in block.parameters() if parameter not in routed]
        )
        yield ParameterGroup(layer, exchange.experts, list(routed))


def kinds(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> dict[tuple[torch.dtype, bool], list[nn.Parameter]]:
    """Group the parameters by dtype, which is ``dtype`` for trained ones, and by whether they are trained."""
    groups: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        trained = parameter.requires_grad
        groups.setdefault((dtype if trained else parameter.dtype, trained), []).append(parameter)
    return groups


def empty(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device, pieces: int = 1) -> Tensor:
    """Allocate a buffer for the local shards of the parameters, padded for ``pieces`` pieces of equal size."""
    return torch.empty(padded_size(sum(sizes_of(parameters)), pieces), dtype=dtype, device=device)


@torch.no_grad()
def views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """Return a tensor for each parameter, sharded like it; the local shards are adjacent views of ``flat``."""
    shapes = [local_tensor(parameter).shape for parameter in parameters]
    parts = map(Tensor.view, split_flat(flat, sizes_of(parameters)), shapes)
    return [sharded_like(*each) for each in zip(parameters, parts, strict=True)]


def adjacent_weights(layers: Sequence[Linear]) -> Tensor:
    """Return a view of adjacent weights as one matrix, [sum of outputs, inputs]; raise ValueError if they are not
    adjacent."""
    parts = [local_tensor(layer.weight.detach()) for layer in layers]
    for part, following in pairwise(parts):
        shares = part.untyped_storage()._cdata == following.untyped_storage()._cdata
        if not shares or part.storage_offset() + part.numel() != following.storage_offset():
            raise ValueError("the weights are not adjacent in memory")
    return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def accumulate_in_fp32(stages: Iterable[nn.Module]) -> None:
    """Sum the bf16 gradients of micro-batches in fp32, as FSDP does for sharded parameters."""
    for parameter in trained_parameters(stages):
        if parameter.dtype is torch.float32:  # hooks would do nothing, for some microseconds each
            continue
        parameter.grad_dtype = None  # any
        parameter.register_hook(partial(_rounded, parameter.dtype))
        parameter.register_post_accumulate_grad_hook(_to_fp32)


def _rounded(dtype: torch.dtype, gradient: Tensor) -> Tensor:
    """Some kernels return the gradient of a norm in fp32."""
    return gradient if gradient.dtype is dtype else gradient.to(dtype).to(gradient.dtype)


def _to_fp32(parameter: Tensor) -> None:
    """Convert the first micro-batch's gradient to fp32; autograd adds later gradients to it in place."""
    assert parameter.grad is not None
    if parameter.grad.dtype is not torch.float32:
        parameter.grad = parameter.grad.float()


def trained_parameters(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]


def sum_in_products(stages: Iterable[TrainedStage]) -> None:
    """Make products of the backward pass add to weight gradients in place, unless weights are replicated."""
    for stage in stages:
        for owner, layers in products(stage.model):
            assert owner.weight is not None
            weights = [layer.weight for layer in layers]
            if all(weight.requires_grad and not is_replicated(weight) for weight in weights):
                owner.gradients = GradientSum(local_tensor(owner.weight.detach()), weights)
                stage.gradient_sums.append(owner.gradients)


def products(stage: nn.Module) -> Iterator[tuple[Joined | Linear, tuple[Linear, ...]]]:
    """Yield each ``Joined`` or ``Linear`` that multiplies by one matrix, and the layers whose weights form it."""
    joined = [each for each in joined_layers(stage) if all(map(is_plain, each.layers))]
    parts = {layer for each in joined if each.weight is not None or each.group is not None for layer in each.layers}
    yield from ((each, each.layers) for each in joined if each.weight is not None)
    yield from ((each, (each,)) for each in stage.modules() if type(each) is Linear and each not in parts)


def is_replicated(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and any(placement.is_replicate() for placement in weight.placements)


def overlap_exchange(stages: Sequence[TrainedStage]) -> None:
    """Make stages exchange gradients during the backward pass, and await other ranks' updates in the forward pass."""
    reduction = Reduction()
    for stage in stages:
        stage.reduction = reduction
        for layer, grouped in groupby(stage.buckets, key=lambda bucket: bucket.layer):
            buckets = list(grouped)
            parameters = {parameter for bucket in buckets for parameter in bucket.parameters}
            unit = Unit(buckets, [each for each in stage.gradient_sums if parameters.issuperset(each.parameters)])
            reduction.units.append(unit)
            module = stage.model if layer is None else stage.model.block(layer)
            module.register_forward_pre_hook(partial(enter, unit, reduction))

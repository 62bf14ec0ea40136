# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of a step, with gradient accumulation over micro-batches."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.catalogue.records import Layout
from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import GradientSum, Joined, Linear, is_plain, joined_layers
from llmb.engine.model.local_shard import local_tensor
from llmb.engine.parallel.data_parallel import accumulate
from llmb.engine.parallel.exchange import Reduction, Unit, reduce_partial_gradient


def accumulate_in_fp32(stages: Iterable[nn.Module]) -> None:
    """Sums gradients of micro-batches in fp32 though they are computed in bf16, as FSDP does for sharded parameters."""
    for parameter in trained_parameters(stages):
        if parameter.dtype is torch.float32:  # hooks would do nothing, for some microseconds each
            continue
        parameter.grad_dtype = None  # any
        parameter.register_hook(partial(_rounded, parameter.dtype))
        parameter.register_post_accumulate_grad_hook(_to_fp32)


def _rounded(dtype: torch.dtype, gradient: Tensor) -> Tensor:
    """Some kernels give the gradient of a norm in fp32."""
    return gradient if gradient.dtype is dtype else gradient.to(dtype).to(gradient.dtype)


def _to_fp32(parameter: Tensor) -> None:
    """After the first micro-batch; the others are added in place."""
    assert parameter.grad is not None
    if parameter.grad.dtype is not torch.float32:
        parameter.grad = parameter.grad.float()


def sum_in_products(stages: Iterable[Decoder]) -> None:
    """Makes the products of the backward pass add to the gradients of matrices, instead of autograd, in place.

    For parameters with memory in the dtype that their gradients are summed in; not for replicas, of which each rank has
    a partial sum.
    """
    for stage in stages:
        for owner, layers in products(stage):
            assert owner.weight is not None
            weights = [layer.weight for layer in layers]
            if all(map(is_summed, weights)):
                owner.gradients = GradientSum(local_tensor(owner.weight.detach()), weights)
                stage.gradient_sums.append(owner.gradients)


def products(stage: nn.Module) -> Iterator[tuple[Joined | Linear, tuple[Linear, ...]]]:
    """What multiplies by one matrix, and the layers that it multiplies for; not layers side by side that share an input
    which they gather."""
    joined = [each for each in joined_layers(stage) if all(map(is_plain, each.layers))]
    parts = {layer for each in joined if each.weight is not None or each.group is not None for layer in each.layers}
    yield from ((each, each.layers) for each in joined if each.weight is not None)
    yield from ((each, (each,)) for each in stage.modules() if type(each) is Linear and each not in parts)


def is_summed(weight: Tensor) -> bool:
    sharded = not isinstance(weight, DTensor) or not any(placement.is_replicate() for placement in weight.placements)
    return weight.requires_grad and sharded


def overlap_exchange(stages: Sequence[Decoder]) -> None:
    """Makes blocks send their gradients, and wait for what other ranks updated, when a pass comes to them."""
    reduction = Reduction()
    for stage in stages:
        stage.reduction = reduction
        for layer, buckets in groupby(stage.buckets, key=lambda bucket: bucket.layer):
            unit = Unit.of(list(buckets), stage.gradient_sums)
            reduction.units.append(unit)
            if layer is None:
                stage.outer = unit
            else:
                stage.block(layer).exchanged = unit, reduction


def reduce_gradients(stages: Sequence[Decoder], tp: int) -> None:
    """At the end of a step's passes, over all ranks that have the same parameters. tp: those that share a layer."""
    for gradients in (each for stage in stages for each in stage.gradient_sums):
        gradients.give()
    if stages[0].reduction is not None:
        stages[0].reduction.finish()
    for parameter in trained_parameters(stages) if tp > 1 else ():
        reduce_partial_gradient(parameter)


def trained_parameters(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]


class Passes(Protocol):
    """Runs the passes of a step on this rank's part of the model."""

    @property
    def stages(self) -> Sequence[Decoder]: ...

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor | None:
        """Accumulates the gradients of the mean loss. Returns this rank's loss, 0-d fp64, or None if it has none.

        count: labels per micro-batch and rank, averaged over the step's micro-batches and ranks. A sum divided by it
        is, on average, the mean over all labels.
        """


class Accumulation:
    """Runs micro-batches one by one through the full model."""

    def __init__(self, model: Decoder, layout: Layout, positions: Tensor) -> None:
        self.stages = [model]
        self.layout = layout
        self.positions = positions

    def add_gradients(self, batches: Iterable[MicroBatch], count: Tensor | float) -> Tensor:
        (model,), ga = self.stages, self.layout.ga
        # fp64: in fp32 the last digit of the mean would depend on the order of the losses.
        total = torch.zeros((), device=self.positions.device, dtype=torch.float64)
        for index, batch in enumerate(batches):
            accumulate(model, last=index == ga - 1)
            # Divided here, not afterwards, which would round bf16 gradients once more.
            loss = model(
                batch.tokens[:, self.positions],
                batch.labels[:, self.positions],
                self.positions,
                batch.starts,
                count * ga,
                batch.segments,
            )
            loss.backward()
            total += loss.detach()
        return total

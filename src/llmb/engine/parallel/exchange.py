# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of ranks that hold parameters whole: they sum gradients, and exchange the pieces that each
updates."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from llmb.engine.collectives import Group, c10d
from llmb.engine.model.decoder import Decoder, initial_values
from llmb.engine.model.linear import GradientSum, local_tensor, sharded_like

ALIGNED = 64
"""Each of several pieces has a multiple of this many elements, so that kernels process whole vectors."""


class Peers(NamedTuple):
    """Ranks that hold the same parameters; groups are None for a single rank."""

    pieces: Group | None
    """Ranks that update different pieces."""
    replicas: Group | None
    """Ranks that update the same piece."""
    batches: int
    """Number of ranks whose losses are averaged."""
    dtype: torch.dtype
    """Dtype of gradient sums."""

    @property
    def parts(self) -> int:
        """The number of pieces."""
        return 1 if self.pieces is None else self.pieces.size

    @property
    def copies(self) -> int:
        """The number of ranks that update the same piece."""
        return 1 if self.replicas is None else self.replicas.size


@dataclass(eq=False, slots=True)
class RankPart:
    """Elements ``start`` to ``stop`` of a parameter's flattened local shard that this rank updates; tensors are [stop -
    start]."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: Tensor
    weight: Tensor | None
    """The parameter's elements that ``values`` are rounded to; None if ``values`` are these elements."""
    gradient: Tensor | None = None
    """Mean over all ranks, from its reduction until the update; else None."""


class Held(NamedTuple):
    """A parameter's values on this rank, fp32 if trained: its shard, or only the elements of ``part`` if set."""

    name: str
    parameter: nn.Parameter
    values: Tensor
    part: RankPart | None


class Bucket:
    """Parameters that are reduced and gathered together, one after the other in ``flat``, with padding at the end."""

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Tensor, peers: Peers, layer: str | None) -> None:
        self.parameters, self.flat, self.peers, self.layer = parameters, flat, peers, layer
        self.sizes = sizes_of(parameters)
        self.parts = None if peers.pieces is None else list(self._rank_parts(peers.pieces))
        self.reduced: Tensor | None = None
        self.gathered: Tensor | None = None

    def _rank_parts(self, pieces: Group) -> Iterator[RankPart]:
        own = self._piece(pieces)
        begin, exact = pieces.rank * len(own), own.dtype is torch.float32
        values = own if exact else torch.empty_like(own, dtype=torch.float32)
        for parameter, size, end in zip(self.parameters, self.sizes, accumulate(self.sizes), strict=True):
            first, last = max(end - size, begin), min(end, begin + len(own))
            if first < last:
                place, before = slice(first - begin, last - begin), end - size
                yield RankPart(parameter, first - before, last - before, values[place], None if exact else own[place])

    def _piece(self, pieces: Group) -> Tensor:
        return self.flat.view(pieces.size, -1)[pieces.rank]

    @torch.no_grad()
    def begin_reduction(self) -> None:
        """Move the parameters' gradients to a buffer, and start to sum it over the ranks."""
        # All parameters, one after the other, after partial sums of tensor-parallel ranks are reduced.
        gradient = torch.empty_like(self.flat, dtype=self.peers.dtype)
        gradient[sum(self.sizes) :].zero_()
        for parameter, place in zip(self.parameters, split_flat(gradient, self.sizes), strict=True):
            if parameter.grad is None:
                place.zero_()
                continue
            reduce_partial_gradient(parameter)
            place.copy_(local_tensor(parameter.grad).flatten())
            parameter.grad = None
        pieces, replicas, *_ = self.peers
        if pieces is not None:
            gradient = c10d.reduce_scatter_tensor(gradient, "sum", pieces.size, pieces.name)
        elif replicas is not None:
            gradient = c10d.all_reduce_(gradient, "sum", replicas.name)
        self.reduced = gradient

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """Wait for the sums, and set the mean gradients of the parts or of the parameters."""
        gradient = c10d.wait_tensor(self.reduced)
        self.reduced = None
        pieces, replicas, *_ = self.peers
        if pieces is not None and replicas is not None:
            gradient = c10d.wait_tensor(c10d.all_reduce_(gradient, "sum", replicas.name))
        gradient.div_(self.peers.batches)
        if self.parts is None:
            for parameter, mean in zip(self.parameters, split_flat(gradient, self.sizes), strict=True):
                parameter.grad = sharded_like(parameter, mean.view(local_tensor(parameter.detach()).shape))
            return
        for part, mean in zip(self.parts, split_flat(gradient, [len(part.values) for part in self.parts]), strict=True):
            part.gradient = mean

    def round_parts(self) -> None:
        """Set this rank's piece to its fp32 values, rounded."""
        for part in self.parts or ():
            if part.weight is not None:
                part.weight.copy_(part.values)

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Start to gather the pieces that all ranks have updated."""
        if self.peers.pieces is not None:
            name, size, *_ = self.peers.pieces
            own = self._piece(self.peers.pieces)
            self.gathered = c10d.all_gather_into_tensor_out(own, size, name, out=self.flat)

    def finish_gather(self) -> None:
        """Wait for a gather in progress, if any: afterwards the parameters are complete."""
        if self.gathered is not None:
            c10d.wait_tensor(self.gathered)
            self.gathered = None


@dataclass(eq=False, slots=True)
class Unit:
    """Buckets that are reduced together: a block's, or all of a stage outside of blocks."""

    buckets: Sequence[Bucket]
    sums: Sequence[GradientSum]
    """Gradients that products add to."""
    passes: int | None = None
    """Number of remaining backward passes of the step; None once the gradients are being reduced."""


class Reduction:
    """Sums gradients over ranks, block by block, during the backward pass; copies of at most two units exist."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.travelling: Sequence[Bucket] = ()

    def begin_step(self, micro_batches: int) -> None:
        for unit in self.units:
            unit.passes = micro_batches

    def count_pass(self, unit: Unit) -> None:
        """Count a backward pass; start to reduce the unit's gradients after the last one of a step."""
        if unit.passes is not None:
            unit.passes -= 1
            if unit.passes == 0:
                self._send(unit)

    def finish(self) -> None:
        """Reduce the remaining gradients after a step's passes: of parameters outside of blocks, for example."""
        for unit in self.units:
            if unit.passes is not None:
                self._send(unit)
        self._arrive(())

    def _send(self, unit: Unit) -> None:
        unit.passes = None
        for each in unit.sums:
            each.give()
        for bucket in unit.buckets:
            bucket.begin_reduction()
        self._arrive(unit.buckets)

    def _arrive(self, following: Sequence[Bucket]) -> None:
        for bucket in self.travelling:
            bucket.finish_reduction()
        self.travelling = following


@dataclass(eq=False, slots=True)
class TrainedStage:
    """A stage of the model, and its training state."""

    model: Decoder
    masters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """fp32 masters, sharded like their parameters."""
    buckets: list[Bucket] = field(default_factory=list)
    """Trained parameters to exchange with other ranks."""
    gradient_sums: list[GradientSum] = field(default_factory=list)
    """Gradients that products add to."""
    reduction: Reduction | None = None
    """Sums the gradients of all stages of this rank; None if they are not exchanged here."""

    def held(self) -> Iterator[Held]:
        """Yield this rank's part, the master or the parameter itself, except parameters that only other ranks
        update."""
        split = [bucket for bucket in self.buckets if bucket.parts is not None]
        own = {part.parameter: part for bucket in split for part in bucket.parts or ()}
        in_parts = {parameter for bucket in split for parameter in bucket.parameters}
        for name, parameter in self.model.named_parameters():
            part = own.get(parameter)
            if part is not None:
                yield Held(name, parameter, part.values, part)
            elif parameter not in in_parts:
                yield Held(name, parameter, self.masters.get(parameter, parameter), None)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial values of all parameters. A collective."""
        for name, parameter, values, part in self.held():
            initial = initial_values(self.model, name, parameter.detach(), seed)
            local_tensor(values).copy_(initial if part is None else initial.flatten()[part.start : part.stop])
        self.round_masters()

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set the parameters by rounding their masters, and gather all pieces. A collective."""
        for parameter, master in self.masters.items():
            local_tensor(parameter).copy_(local_tensor(master))
        for bucket in self.buckets:
            bucket.round_parts()
            bucket.begin_gather()
            bucket.finish_gather()


Stages = Sequence[TrainedStage]


def await_updates(buckets: Iterable[Bucket]) -> None:
    """Wait for the pieces that other ranks updated in the last step, before any parameter is read."""
    for bucket in buckets:
        bucket.finish_gather()


def enter(unit: Unit, reduction: Reduction, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Await updates before the forward pass; for a block, also mark the end of its backward pass."""
    await_updates(unit.buckets)
    return (BlockEntry.apply(inputs[0], unit, reduction), *inputs[1:]) if unit.buckets[0].layer else inputs


class _BlockEntryContext(FunctionCtx):
    unit: Unit
    reduction: Reduction


class BlockEntry(torch.autograd.Function):
    """Passes hidden states to a block; its backward pass runs once autograd has computed all gradients of the block."""

    @staticmethod
    def forward(ctx: _BlockEntryContext, hidden: Tensor, unit: Unit, reduction: Reduction) -> Tensor:
        ctx.unit, ctx.reduction = unit, reduction
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: _BlockEntryContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.reduction.count_pass(ctx.unit)
        return gradient, None, None


def split_flat(flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split the first elements of ``flat`` into parts of these sizes."""
    return torch.split(flat[: sum(sizes)], list(sizes))


def sizes_of(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the numbers of elements in the parameters' local shards."""
    return [local_tensor(parameter.detach()).numel() for parameter in parameters]


def padded_size(elements: int, pieces: int) -> int:
    """Return the number of elements, padded for this many pieces of equal size; one piece has no padding."""
    whole = pieces * ALIGNED
    return ceil(elements / whole) * whole if pieces > 1 else elements


def reduce_partial_gradient(parameter: nn.Parameter) -> None:
    """Reduce a gradient that tensor-parallel ranks hold as partial sums, as FSDP does for sharded parameters."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)

# SPDX-License-Identifier: Apache-2.0
"""The content of a checkpoint: only tensors, because unpickling other objects can run code; any layout can read it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmb.engine.optimizer import AdamW
from llmb.engine.parallel.exchange import RankPart, Stages, TrainedStage
from llmb.engine.precision.apply import scale_state

Numbers = tuple[int, ...]


class PartPlace(NamedTuple):
    """The place of elements ``start`` to ``stop`` of a rank's flattened shard of a tensor."""

    start: int
    stop: int
    shape: Numbers
    """Shape of the shard."""
    offset: Numbers
    """Offset of the shard in the tensor."""
    full: Numbers
    """Shape of the tensor."""

    def boxes(self, elements: Tensor) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Yield each box of ``elements``: its place in the full tensor, and a view of its elements."""
        begin = 0
        for first, sizes in boxes(self.shape, self.start, self.stop):
            offset = torch.Size(own + more for own, more in zip(self.offset, first, strict=True))
            yield ChunkStorageMetadata(offset, torch.Size(sizes)), elements[begin : begin + prod(sizes)].view(sizes)
            begin += prod(sizes)


Places = Mapping[str, PartPlace]
"""Places by the names of tensors in a checkpoint."""


def place_of(part: RankPart) -> PartPlace:
    shape, offset = _shard(part.parameter.detach())
    return PartPlace(part.start, part.stop, shape, offset, tuple(part.parameter.shape))


def _shard(tensor: Tensor) -> tuple[Numbers, Numbers]:
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(shape), tuple(offset)
    return tuple(tensor.shape), (0,) * tensor.ndim


def shard_places(state: Mapping[str, Tensor]) -> Places:
    """Return the places of this rank's shards of the DTensors in ``state``, except scalars."""
    shards = {name: (tensor, *_shard(tensor)) for name, tensor in state.items() if isinstance(tensor, DTensor)}
    return {
        name: PartPlace(0, prod(shape), shape, offset, tuple(tensor.shape))
        for name, (tensor, shape, offset) in shards.items()
        if shape
    }


def local_elements(state: Mapping[str, Tensor], places: Places) -> dict[str, Tensor]:
    """Return this rank's values of ``state`` as plain tensors; tensors with a place are flattened."""
    local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    return {name: tensor.flatten() if name in places else tensor for name, tensor in local.items()}


def boxes(shape: Numbers, start: int, stop: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield offsets and sizes of the boxes of a tensor's elements ``start`` to ``stop``, in order."""
    rest = shape[1:]
    row = prod(rest)
    if not rest:
        yield (start,), (stop - start,)
        return
    first, last = -(-start // row), stop // row
    inside = first > last
    if start % row:
        yield from _in_row(first - 1, rest, start % row, stop - (first - 1) * row if inside else row)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    if stop % row and not inside:
        yield from _in_row(last, rest, 0, stop % row)


def _in_row(number: int, shape: Numbers, start: int, stop: int) -> Iterator[tuple[Numbers, Numbers]]:
    for offset, sizes in boxes(shape, start, stop):
        yield (number, *offset), (1, *sizes)


def _box_at(index: MetadataIndex, place: PartPlace, elements: Tensor) -> Tensor:
    return next(box for chunk, box in place.boxes(elements) if chunk.offsets == index.offset)


class PartsSavePlanner(DefaultSavePlanner):
    """Saves tensors; if a tensor has a place, only the elements in that place."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def create_local_plan(self) -> SavePlan:
        state = self.state_dict
        self.state_dict = {name: tensor for name, tensor in state.items() if name not in self.places}
        plan = super().create_local_plan()
        self.state_dict = state
        items = list(plan.items)
        for name, place in self.places.items():
            for chunk, box in place.boxes(state[name]):
                written = TensorWriteData(chunk, TensorProperties.create_from_tensor(box), torch.Size(place.full))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=written))
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        if index.fqn in self.places:
            return _box_at(index, self.places[index.fqn], self.state_dict[index.fqn])
        value: object = super().lookup_object(index)
        return value


class PartsLoadPlanner(DefaultLoadPlanner):
    """Reads tensors; if a tensor has a place, only the elements in that place."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        state, saved = self.state_dict, self.metadata.state_dict_metadata
        plan = create_default_local_load_plan(
            {name: tensor for name, tensor in state.items() if name not in self.places}, self.metadata
        )
        for name in [name for name in self.places if name in state]:
            stored, place = saved[name], self.places[name]
            if not isinstance(stored, TensorStorageMetadata) or stored.size != place.full:
                raise ValueError(f"{name} does not have the shape {place.full} in the checkpoint")
            chunks = [chunk for chunk, _ in place.boxes(state[name])]
            plan.items.extend(create_read_items_for_chunk_list(name, stored, chunks))
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self.places:
            return _box_at(index, self.places[index.fqn], self.state_dict[index.fqn])
        return super().lookup_tensor(index)


MODEL = "model."
OPTIMIZER = "optimizer."
RANDOM = "random."


def training_state(stages: Stages, optimizers: Sequence[AdamW], device: torch.device) -> dict[str, Tensor]:
    """Return this rank's shard of weights, AdamW's state and FP8 scales, which are live tensors, and random states."""
    state = random_state(device)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        state |= trained_state(stage) | optimizer_state(stage, optimizer)
    return state


def trained_state(stage: TrainedStage) -> dict[str, Tensor]:
    """Return the live tensors of trained weights, in fp32, and of FP8 scales."""
    trained = [each for each in stage.held() if each.parameter.requires_grad]
    return {f"{MODEL}{each.name}": each.values.detach() for each in trained} | scale_state(stage.model)


def optimizer_state(stage: TrainedStage, optimizer: AdamW) -> dict[str, Tensor]:
    """Return the live tensors of AdamW's moments and step counts."""
    return {
        f"{OPTIMIZER}{name}.{kind}": value
        for name, parameter in stage.model.named_parameters()
        if parameter in optimizer.state
        for kind, value in optimizer.state[parameter].items()
    }


def part_places(stages: Stages) -> Places:
    """Return the places of the tensors of ``training_state`` that contain only a part of a parameter."""
    parts = {each.name: place_of(each.part) for stage in stages for each in stage.held() if each.part is not None}
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        key: place
        for name, place in parts.items()
        for key in (f"{MODEL}{name}", *(f"{OPTIMIZER}{name}.{kind}" for kind in kinds))
    }


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {f"{RANDOM}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the random state: all ranks use the same seed, so one state is valid for all of them."""
    torch.set_rng_state(state[f"{RANDOM}cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"{RANDOM}cuda"], device)

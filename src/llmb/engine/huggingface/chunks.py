# SPDX-License-Identifier: Apache-2.0
"""Saves tensors that are not in memory: torch.distributed.checkpoint requests them chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from llmb.huggingface.tensors import Shape

CHUNK_BYTES = 2**28
"""Large enough for a disk, and small enough for a rank that reads a chunk to get its shard of it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``first`` to ``end`` (exclusive) of a parameter."""

    name: str
    first: int
    end: int


def chunks_of(name: str, shape: Shape, largest: int) -> Iterator[Chunk]:
    """Chunks of complete rows of an fp32 parameter, of at most ``largest`` bytes or of a single row."""
    rows = max(1, largest // (4 * prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield Chunk(name, first, min(first + rows, shape[0]))


class ChunkPlanner(DefaultSavePlanner):
    """Plans to write ``shapes`` as fp32 tensors in chunks, each of which is read with ``read`` when it is written."""

    def __init__(self, shapes: Mapping[str, Shape], read: Callable[[Chunk], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shapes = shapes
        self.read = read

    def create_local_plan(self) -> SavePlan:
        chunks = (chunk for name, shape in self.shapes.items() for chunk in chunks_of(name, shape, CHUNK_BYTES))
        self.plan = SavePlan([self._item(chunk) for chunk in chunks])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index, data = write_item.index, write_item.tensor_data
        if index.offset is None or data is None:
            raise AssertionError("every item of the plan is a chunk")
        first = index.offset[0]
        return self.read(Chunk(index.fqn, first, first + data.chunk.sizes[0]))

    def _item(self, chunk: Chunk) -> WriteItem:
        shape = self.shapes[chunk.name]
        offsets = torch.Size([chunk.first, *(0 for _ in shape[1:])])
        sizes = torch.Size([chunk.end - chunk.first, *shape[1:]])
        return WriteItem(
            index=MetadataIndex(chunk.name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size(shape),
            ),
        )

# SPDX-License-Identifier: Apache-2.0
"""Divides the parameters of a checkpoint into chunks and files. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from llmb.huggingface.tensors import Shape

CHUNK_BYTES = 2**27
"""Large enough for a disk, and small enough for a rank that reads a chunk to get its shard of it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, as it is stored."""

    shape: Shape
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``first`` to ``end`` (exclusive) of a parameter."""

    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of a checkpoint, named as torch.distributed.checkpoint names those of a single rank."""

    name: str
    chunks: tuple[Chunk, ...]
    bytes: int
    """Bytes of its tensors."""


def chunks_of(name: str, parameter: Parameter, largest: int) -> Iterator[Chunk]:
    """Chunks of complete rows, of at most ``largest`` bytes or of a single row."""
    rows = max(1, largest // parameter.row_bytes)
    for first in range(0, parameter.shape[0], rows):
        yield Chunk(name, first, min(first + rows, parameter.shape[0]))


def plan_files(parameters: Mapping[str, Parameter], largest_chunk: int, largest_file: int) -> list[WeightFile]:
    """All chunks, in order, in files of at most ``largest_file`` bytes of tensors or of a single chunk."""
    chunks = [
        (chunk, (chunk.end - chunk.first) * parameter.row_bytes)
        for name, parameter in parameters.items()
        for chunk in chunks_of(name, parameter, min(largest_chunk, largest_file))
    ]
    return [
        WeightFile(f"__0_{number}.distcp", tuple(chunk for chunk, _ in group), sum(size for _, size in group))
        for number, group in enumerate(_groups(chunks, largest_file))
    ]


def _groups(chunks: Iterable[tuple[Chunk, int]], largest: int) -> list[list[tuple[Chunk, int]]]:
    groups: list[list[tuple[Chunk, int]]] = []
    room = 0
    for chunk, size in chunks:
        if not groups or size > room:
            groups.append([])
            room = largest
        groups[-1].append((chunk, size))
        room -= size
    return groups

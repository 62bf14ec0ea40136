# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in torch.distributed.checkpoint's format, resumably and chunk by chunk: its own save holds a
file's tensors in memory."""

import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llmb import __version__
from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.base.parent_death import end_with_parent
from llmb.engine.checkpoint.load import torch_message
from llmb.engine.checkpoint.save import causes
from llmb.engine.checkpoint.state import MODEL
from llmb.runs.checkpoint_use import check_room
from llmb.runs.checkpoints.checkpoint import WEIGHTS, StoredDtype
from llmb.runs.checkpoints.checkpoint_files import ChecksumWriter
from llmb.runs.checkpoints.conversion_request import (
    IMPORTED,
    FinishedFile,
    ImportedWeights,
    ImportJob,
    OnNote,
    OnProgress,
    finished_files,
)
from llmb.runs.folder import write_atomically
from llmb.runs.huggingface.tensors import Shape, plan_shards

CHUNK_BYTES = 2**27
"""Largest chunk: large enough for efficient disk access, and small enough for ranks, which read whole chunks."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, as stored."""

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
    """A file of a checkpoint, named as torch.distributed.checkpoint names the files of a single rank."""

    name: str
    chunks: tuple[Chunk, ...]
    bytes: int
    """Bytes of its tensors."""


def chunks_of(name: str, parameter: Parameter, largest: int) -> Iterator[Chunk]:
    """Yield chunks of complete rows, of at most ``largest`` bytes or of a single row."""
    rows = max(1, largest // parameter.row_bytes)
    for first in range(0, parameter.shape[0], rows):
        yield Chunk(name, first, min(first + rows, parameter.shape[0]))


def plan_files(parameters: Mapping[str, Parameter], largest_file: int) -> list[WeightFile]:
    """Return all chunks, in order, in files of at most ``largest_file`` bytes of tensors or of a single chunk."""
    sizes = {
        chunk: (chunk.end - chunk.first) * parameter.row_bytes
        for name, parameter in parameters.items()
        for chunk in chunks_of(name, parameter, min(CHUNK_BYTES, largest_file))
    }
    return [
        WeightFile(f"__0_{number}.distcp", tuple(chunks), sum(sizes[chunk] for chunk in chunks))
        for number, chunks in enumerate(plan_shards(sizes, largest_file))
    ]


FEWER = "run the same command again, with a smaller --processes if memory is short: finished files are kept"
PARENT_GONE = 1


def write_in_processes(
    write: Callable[[WeightFile], FinishedFile], files: Sequence[WeightFile], processes: int
) -> Iterator[FinishedFile]:
    """Write ``files`` in up to ``processes`` processes; yield finished ones. Raise a process's first error, or
    RunFailed if killed."""
    processes = min(processes, len(files))
    if processes < 2:
        yield from map(write, files)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(),))
    try:
        for future in as_completed([pool.submit(write, file) for file in files]):
            yield future.result()
    except BrokenProcessPool as error:
        raise RunFailed("a process that was writing weights was killed", do=FEWER) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(PARENT_GONE)  # it ended before the kernel was asked
    torch.set_num_threads(1)  # the processes share the cores


METADATA = ".metadata"
DTYPE_NAMES: dict[torch.dtype, StoredDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPACE = "correct this, for example by freeing some space, and run the same command again: finished files are kept"


class ChunkSource(Protocol):
    """Reads parameters chunk by chunk; it is sent to the processes that write."""

    @property
    def parameters(self) -> dict[str, Parameter]: ...

    def read(self, chunk: Chunk) -> Tensor:
        """Return the values of a chunk; raise UsageError if they cannot be read or are not finite."""


def write_checkpoint(job: ImportJob, source: ChunkSource, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights:
    """Write ``weights``, except finished files; raise UsageError (unusable source), EnvironmentProblem (failed
    writing) or RunFailed (killed process)."""
    folder, parameters = Path(job.folder), source.parameters
    planned = plan_files(parameters, job.largest_file_bytes)
    try:
        finished = {file.name: file for file in _kept_files(job, on_note)}
        if finished:
            on_note(f"resuming: {len(finished)} of {len(planned)} files already finished")
        remaining = [file for file in planned if file.name not in finished]
        check_room("the weights need", sum(file.bytes for file in remaining), folder, SPACE)
        total = sum(parameter.bytes for parameter in parameters.values())
        done = total - sum(file.bytes for file in remaining)
        on_progress(done, total)

        sizes = {file.name: file.bytes for file in remaining}
        for file in write_in_processes(FileWriter(folder / WEIGHTS, source), remaining, job.processes):
            finished[file.name] = file
            write_atomically(folder / IMPORTED / file.name, file.model_dump_json())
            done += sizes[file.name]
            on_progress(done, total)
        checksum = _write_metadata(folder / WEIGHTS / METADATA, metadata_of(parameters, planned, finished))
    except UsageError as error:
        raise UsageError(error.what, where=error.where or job.source, do=error.do) from error
    except OSError as error:
        raise EnvironmentProblem(
            f"the weights cannot be written: {torch_message(error)}", where=job.folder, do=SPACE
        ) from error
    dtypes = {DTYPE_NAMES[parameter.dtype] for parameter in parameters.values()}
    checksums = {name: finished[name].crc32 for name in sorted(finished)}
    return ImportedWeights(checksums={**checksums, METADATA: checksum}, dtypes=tuple(sorted(dtypes)))


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Writes files of ``weights`` one chunk at a time."""

    folder: Path
    source: ChunkSource

    def __call__(self, file: WeightFile) -> FinishedFile:
        """Write a file to disk; raise OSError if that fails, UsageError for an unusable chunk."""
        path, places = self.folder / file.name, []
        path.unlink(missing_ok=True)  # a process of a killed import may still be writing it
        with ChecksumWriter(path) as stream:
            for chunk in file.chunks:
                begin, values = stream.tell(), self.source.read(chunk)
                _save(values, stream)
                places.append((begin, stream.tell() - begin))
            stream.flush()
            os.fsync(stream.fileno())
        return FinishedFile(name=file.name, bytes=sum(size for _, size in places), crc32=stream.checksum, places=places)


def _save(values: Tensor, stream: ChecksumWriter) -> None:
    try:
        torch.save(values, stream)
    except RuntimeError as error:  # torch.save hides a full disk behind an error about file positions
        raise next((cause for cause in causes(error) if isinstance(cause, OSError)), error) from error


def metadata_of(
    parameters: Mapping[str, Parameter], files: Iterable[WeightFile], finished: Mapping[str, FinishedFile]
) -> Metadata:
    """Return the index of chunks for torch.distributed.checkpoint; it is identical for every folder and attempt."""
    places = {
        chunk: _StorageInfo(file.name, offset, length)
        for file in files
        for chunk, (offset, length) in zip(file.chunks, finished[file.name].places, strict=True)
    }
    chunks: dict[str, list[Chunk]] = {name: [] for name in parameters}
    for chunk in places:
        chunks[chunk.name].append(chunk)
    return Metadata(
        state_dict_metadata={
            MODEL + name: TensorStorageMetadata(
                properties=TensorProperties(dtype=parameter.dtype),
                size=torch.Size(parameter.shape),
                chunks=[_chunk_metadata(chunk, parameter) for chunk in chunks[name]],
            )
            for name, parameter in parameters.items()
        },
        storage_data={
            MetadataIndex(MODEL + chunk.name, _offsets(chunk, parameters[chunk.name])): place
            for chunk, place in places.items()
        },
        storage_meta=StorageMeta(),
    )


def _chunk_metadata(chunk: Chunk, parameter: Parameter) -> ChunkStorageMetadata:
    sizes = torch.Size([chunk.end - chunk.first, *parameter.shape[1:]])
    return ChunkStorageMetadata(offsets=_offsets(chunk, parameter), sizes=sizes)


def _offsets(chunk: Chunk, parameter: Parameter) -> torch.Size:
    return torch.Size([chunk.first, *(0 for _ in parameter.shape[1:])])


def _write_metadata(path: Path, metadata: Metadata) -> str:
    with ChecksumWriter(path) as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return stream.checksum


def _kept_files(job: ImportJob, on_note: OnNote) -> list[FinishedFile]:
    """Return the files that an earlier attempt at the same import finished; remove all other files."""
    # Everything that the files of an import depend on.
    source = {name: (Path(job.source) / name).stat() for name in (*job.files, *job.documents)}
    seen = {name: [found.st_size, found.st_mtime_ns] for name, found in source.items()}
    request = job.model_dump(mode="json", exclude={"processes", "folder"})
    folder, key = Path(job.folder), json.dumps({"version": __version__, "request": request, "source": seen})
    state = folder / IMPORTED / "source.json"
    same = state.is_file() and state.read_text() == key
    if state.is_file() and not same:
        on_note("starting again from the first file: the files, options or version of llmb have changed")
    kept = finished_files(folder) if same else []
    for left in (folder / WEIGHTS, folder / IMPORTED):
        left.mkdir(exist_ok=True)
        for path in left.iterdir():
            if path != state and path.name not in {file.name for file in kept}:
                path.unlink()
    write_atomically(state, key)
    return kept

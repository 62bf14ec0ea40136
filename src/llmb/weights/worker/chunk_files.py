# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of tensors that are not in memory, by several processes, and resumes where a killed one ended.

The format is that of torch.distributed.checkpoint, saved by a single rank.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
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

from llmb.checkpoints.checkpoint import WEIGHTS, StoredDtype
from llmb.checkpoints.checksums import ChecksumWriter
from llmb.checkpoints.conversion import ImportedWeights, ImportJob, OnNote, OnProgress
from llmb.checkpoints.import_journal import FinishedFile, ImportJournal, ImportKey, open_journal, source_file
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.checkpoint.torch_errors import torch_message
from llmb.engine.checkpoint.writer import causes
from llmb.errors import EnvironmentProblem, UsageError
from llmb.runs.disk_space import check_room
from llmb.weights.worker.chunk_processes import write_in_processes
from llmb.weights.worker.chunks import CHUNK_BYTES, Chunk, Parameter, WeightFile, plan_files

METADATA = ".metadata"
DTYPE_NAMES: dict[torch.dtype, StoredDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPACE = "free some space, and run the same command again: files that are finished are kept"


class ChunkSource(Protocol):
    """Reads parameters chunk by chunk; it is sent to the processes that write."""

    @property
    def parameters(self) -> dict[str, Parameter]: ...

    def read(self, chunk: Chunk) -> Tensor:
        """Raises UsageError if the source cannot be taken."""


def write_checkpoint(job: ImportJob, source: ChunkSource, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights:
    """Writes ``weights`` of the job's folder, but for files that an earlier attempt finished.

    Raises UsageError if the source is rejected, EnvironmentProblem if the disk has no space for it.
    """
    folder, parameters = Path(job.folder), source.parameters
    planned = plan_files(parameters, CHUNK_BYTES, job.largest_file_bytes)
    try:
        (folder / WEIGHTS).mkdir(exist_ok=True)
        journal = open_journal(folder, _key(job))
        _tell(journal, len(planned), on_note)
        left = [file for file in planned if file.name not in journal.finished]
        check_room("the weights need", sum(file.bytes for file in left), folder, SPACE)
        finished = {**journal.finished}
        total = sum(parameter.bytes for parameter in parameters.values())
        done = total - sum(file.bytes for file in left)
        on_progress(done, total)

        def keep(file: FinishedFile) -> None:
            finished[file.name] = file
            journal.add(file)

        def count(bytes_: int) -> None:
            nonlocal done
            done += bytes_
            on_progress(done, total)

        write_in_processes(FileWriter(folder / WEIGHTS, source), left, job.processes, keep, count)
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


class FileWriter:
    """Writes files of ``weights`` one chunk at a time."""

    def __init__(self, folder: Path, source: ChunkSource) -> None:
        self.folder = folder
        self.source = source

    def __call__(self, file: WeightFile, on_bytes: Callable[[int], None]) -> FinishedFile:
        """Returns when the file is on disk. Raises UsageError if the source is rejected, OSError."""
        path, places = self.folder / file.name, []
        path.unlink(missing_ok=True)  # a process of a killed import may still be writing it
        with ChecksumWriter(path) as stream:
            for chunk in file.chunks:
                begin, values = stream.tell(), self.source.read(chunk)
                _save(values, stream)
                places.append((begin, stream.tell() - begin))
                on_bytes(values.numel() * values.element_size())
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
    """What torch.distributed.checkpoint needs to find every chunk; the same bytes for every folder and attempt."""
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


def _key(job: ImportJob) -> ImportKey:
    source = Path(job.source)
    weights = {name: source_file(source / name, checksum=False) for name in job.files}
    documents = {name: source_file(source / name, checksum=True) for name in job.documents}
    return ImportKey(
        source=job.source,
        source_files={**weights, **documents},
        model=job.model,
        largest_file_bytes=job.largest_file_bytes,
    )


def _tell(journal: ImportJournal, files: int, on_note: OnNote) -> None:
    if journal.restarted:
        on_note(f"starting again from the first file: {journal.restarted}")
    if journal.finished:
        on_note(f"resuming: {len(journal.finished)} of {files} files are finished")

# SPDX-License-Identifier: Apache-2.0
"""Writes this rank's files of a checkpoint, with the reason if that fails."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from llmb.checkpoints.files import ChecksumWriter
from llmb.errors import EnvironmentProblem


@dataclass(frozen=True)
class ChecksummedWrite(WriteResult):
    """A tensor that was written, with the checksum of its file."""

    checksum: str


class ChecksumFileSystem(FileSystem):
    """Files on disk, whose checksums are known once they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # noqa: ARG002 (always "wb")
        with ChecksumWriter(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksum


class Writer(FileSystemWriter):
    """Raises the error of the operating system: torch.save hides a full disk behind an error about file positions.

    The metadata that a save returns lists the written tensors: torch 2.11 adds them only to a copy of it. On the
    coordinator, ``checksums`` are those of all ranks' files, by name, once the save is finished.
    """

    def __init__(self, path: Path, **options: Any) -> None:  # noqa: ANN401 (those of torch)
        super().__init__(path, **options)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self.checksums: dict[str, str] = {}

    def storage_meta(self) -> StorageMeta:
        """Without the folder, whose type has another name in the pickles of another version of Python."""
        return StorageMeta(save_id=self.save_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory, which later steps do not change."""
        return super().stage({name: _copyable(tensor) for name, tensor in state_dict.items()})

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:
            raise next((cause for cause in causes(error) if isinstance(cause, OSError)), error) from error
        results: Future[list[WriteResult]] = Future()
        results.set_result([self._with_checksum(result) for result in written])
        return results

    def _with_checksum(self, result: WriteResult) -> ChecksummedWrite:
        checksum = self.fs.checksums[result.storage_data.relative_path]
        return ChecksummedWrite(result.index, result.size_in_bytes, result.storage_data, checksum)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        of_ranks = [result for written in results for result in written if isinstance(result, ChecksummedWrite)]
        self.checksums = {result.storage_data.relative_path: result.checksum for result in of_ranks}
        # The metadata was written under a temporary name.
        self.checksums |= {name.removesuffix(".tmp"): checksum for name, checksum in self.fs.checksums.items()}
        metadata.storage_data = {result.index: result.storage_data for written in results for result in written}


def _copyable(tensor: Tensor) -> Tensor:
    """On a CPU, torch cannot copy a shard that is a view into a buffer, except by ``clone``."""
    is_view = isinstance(tensor, DTensor) and tensor.device.type == "cpu" and tensor.storage_offset() > 0
    return tensor.clone() if is_view else tensor


def causes(error: BaseException) -> Iterator[BaseException]:
    """The causes of ``error``, the latest first."""
    cause = error.__cause__ or error.__context__
    while cause:
        yield cause
        cause = cause.__cause__ or cause.__context__


def cannot_save(name: str, error: OSError) -> EnvironmentProblem:
    advice = "free some space, or set LLMB_INSTALL to a folder on another disk"
    return EnvironmentProblem(f"the checkpoint cannot be saved: {error}", where=name, do=advice)

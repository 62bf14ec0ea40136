# SPDX-License-Identifier: Apache-2.0
"""Writes this rank's files of a checkpoint, with the reason if that fails."""

from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmb.errors import EnvironmentProblem


class Writer(FileSystemWriter):
    """Raises the error of the operating system: torch.save hides a full disk behind an error about file positions.

    The metadata that a save returns lists the written tensors: torch 2.11 adds them only to a copy of it.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise next((cause for cause in causes(error) if isinstance(cause, OSError)), error) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {result.index: result.storage_data for written in results for result in written}


def causes(error: BaseException) -> Iterator[BaseException]:
    """The causes of ``error``, the latest first."""
    cause = error.__cause__ or error.__context__
    while cause:
        yield cause
        cause = cause.__cause__ or cause.__context__


def cannot_save(name: str, error: CheckpointException | OSError) -> EnvironmentProblem:
    """The reason of the first rank that failed, without the stack traces of all ranks."""
    reason = str(error)
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        reason = f"rank {rank}: {cause}"
    advice = "free some space, or set LLMB_INSTALL to a folder on another disk"
    return EnvironmentProblem(f"the checkpoint cannot be saved: {reason}", where=name, do=advice)

# SPDX-License-Identifier: Apache-2.0
"""Writes this rank's files of a checkpoint, and says why where it cannot."""

from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llmb.errors import EnvironmentProblem


class Writer(FileSystemWriter):
    """Fails with what the system said: torch.save hides a full disk behind an error about its own file positions.

    What it wrote stands in the metadata that a save returns: torch 2.11 enters it in a copy.
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
    """What led to ``error``, the latest first."""
    cause = error.__cause__ or error.__context__
    while cause:
        yield cause
        cause = cause.__cause__ or cause.__context__


def cannot_save(name: str, error: CheckpointException | OSError) -> EnvironmentProblem:
    """The reason of the first rank that failed, without the stack traces of all."""
    reason = str(error)
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        reason = f"rank {rank}: {cause}"
    advice = "free some space, or set LLMB_INSTALL to a folder on another disk"
    return EnvironmentProblem(f"the checkpoint cannot be saved: {reason}", where=name, do=advice)

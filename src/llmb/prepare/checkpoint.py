# SPDX-License-Identifier: Apache-2.0
"""Prepares the weights of a fine-tuning: a checkpoint made from a Hugging Face model, or found prepared."""

from dataclasses import dataclass
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Source
from llmb.catalogue.resolve import find_model
from llmb.errors import UsageError
from llmb.prepare.dataset import source_of
from llmb.prepared.folders import PreparedFolders
from llmb.programs.engine.conversion import ImportRequest, import_checkpoint
from llmb.runs.checkpoint import SavedCheckpoint, model_differences, read_checkpoint
from llmb.runs.conversion import OnNote, OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """What to prepare, and how."""

    workload: str
    size: str
    source: Path | None
    """A folder; None for the hub."""
    processes: int
    largest_file_bytes: int


@dataclass(frozen=True, slots=True)
class PreparedCheckpoint:
    checkpoint: SavedCheckpoint
    made: bool
    """False if it had been prepared before."""


def prepare_checkpoint(
    catalogue: Catalogue,
    request: CheckpointRequest,
    folders: PreparedFolders,
    on_progress: OnProgress,
    on_note: OnNote,
) -> PreparedCheckpoint:
    """Imports the model of a fine-tuning, resumes an import that was killed, or finds the checkpoint complete.

    Raises UsageError for a source that cannot be imported, or a checkpoint that is damaged or from elsewhere, and
    EnvironmentProblem if the disk has no space.
    """
    source = source_of(catalogue, request.workload, request.size)
    model = find_model(catalogue, request.workload, request.size)
    target = folders.model(source.model)
    if target.exists():
        checkpoint = _complete(target)
        if differences := list(model_differences(model, checkpoint.record.model)):
            raise _other(target, f"of another model: {differences[0]}")
        imported = checkpoint.record.imported_from
        if request.source and imported and Path(imported.path) != request.source.absolute():
            raise _other(target, f"prepared from {imported.path}")
        return PreparedCheckpoint(checkpoint, made=False)
    path = request.source or _fetched(source)
    import_checkpoint(
        ImportRequest(path, target, request.workload, model, request.processes, request.largest_file_bytes),
        on_progress,
        on_note,
    )
    return PreparedCheckpoint(read_checkpoint(target), made=True)


def _complete(target: Path) -> SavedCheckpoint:
    try:
        return read_checkpoint(target)
    except UsageError as error:
        raise UsageError(error.what, where=error.where, do="remove this folder, and prepare it again") from error


def _other(target: Path, what: str) -> UsageError:
    return UsageError(
        f"the checkpoint that is there is {what}", where=str(target), do="remove this folder to prepare another one"
    )


def _fetched(source: Source) -> Path:
    """The folder of a model of the hub. Raises UsageError for one that is not there."""
    if source.page is None:
        do = "give a folder with --source; 'llmb prepare sample' makes one with a small model"
        raise UsageError(f"{source.model} is not on the hub", do=do)
    do = f"download it ('hf download {source.model} --local-dir FOLDER'), and give the folder with --source"
    raise UsageError("the hub is not supported yet", do=do)

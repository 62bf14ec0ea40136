# SPDX-License-Identifier: Apache-2.0
"""Prepares the weights for fine-tuning: imports a model from the hub or a folder, unless a checkpoint exists."""

from dataclasses import dataclass
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Source
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model, source_of
from llmb.catalogue.throughput import parameter_count
from llmb.runs.checkpoint_use import check_room
from llmb.runs.checkpoints.checkpoint import WEIGHTS, SavedCheckpoint, model_differences, read_checkpoint
from llmb.runs.checkpoints.checkpoint_files import partial_path
from llmb.runs.checkpoints.conversion_request import OnNote, OnProgress
from llmb.runs.checkpoints.prepared_data import PreparedFolders
from llmb.setup.prepare.conversion import ImportRequest, import_checkpoint
from llmb.setup.prepare.hub import fetch_model, hub_cache

PUBLISHED_BYTES = 2
"""Bytes per parameter of the models that the documents fine-tune, which are published in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """The model to prepare, its source, and the resources to use."""

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
    """False if the checkpoint already existed."""


def prepare_checkpoint(
    catalogue: Catalogue, request: CheckpointRequest, folders: PreparedFolders, on_progress: OnProgress, on_note: OnNote
) -> PreparedCheckpoint:
    """Import the base model unless its checkpoint exists; resume a killed import.

    Raise UsageError or EnvironmentProblem.
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
    if request.source is None and source.page:
        _check_room(model, source, folders, target)
    path = request.source or fetch_model(source.model, source.page, folders, on_progress)
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
        raise UsageError(error.what, where=error.where, do=f"move {target} away, and run this command again") from error


def _other(target: Path, what: str) -> UsageError:
    return UsageError(
        f"the existing checkpoint is {what}", where=str(target), do="remove this folder to prepare another checkpoint"
    )


def _check_room(model: Model, source: Source, folders: PreparedFolders, target: Path) -> None:
    size = PUBLISHED_BYTES * parameter_count(model)[0]
    converted = min(size, _size(partial_path(target) / WEIGHTS))
    cache, need = hub_cache(folders.hub), size - converted
    if cache == folders.hub:
        need += size - min(size, _size(cache / f"models--{source.model.replace('/', '--')}" / "blobs"))
    what = f"downloading and converting {source.model} need"
    check_room(what, need, target, "free some space, or set LLMB_INSTALL to a folder on another disk")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))

# SPDX-License-Identifier: Apache-2.0
"""Whole conversions between checkpoints and Hugging Face's folders: checks, weights, and the name at the end."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llmb import __version__
from llmb.catalogue.records import Model
from llmb.errors import UsageError
from llmb.huggingface.config import ExportDtype, config_differences, config_of, unknown_keys
from llmb.huggingface.folder import HuggingFaceFolder, read_folder
from llmb.huggingface.shards import CONFIG
from llmb.programs.engine.converter import check_converter, run_converter
from llmb.runs.checkpoint import (
    RECORD,
    WEIGHTS,
    CheckpointRecord,
    Origin,
    SavedCheckpoint,
    damage_error,
    read_checkpoint,
)
from llmb.runs.checksums import damaged_files
from llmb.runs.conversion import Checksums, ExportJob, ImportJob, OnProgress
from llmb.runs.disk_space import check_weights_space
from llmb.runs.folder import write_atomically
from llmb.runs.new_folder import check_free, new_folder
from llmb.runs.record import now

BYTES = {"fp32": 4, "bf16": 2}
MOST_PROBLEMS = 20
OnNote = Callable[[str], None]


def verify_saved(checkpoint: SavedCheckpoint, on_note: OnNote) -> None:
    """Reads every file. Raises UsageError if one is damaged; notes it if the checkpoint has no checksums."""
    checksums = checkpoint.record.crc32
    if checksums is None:
        on_note(f"{checkpoint.path} is not verified: it has no checksums")
        return
    began = time.monotonic()
    if damaged := list(damaged_files(checkpoint.path, checksums, threads=os.cpu_count() or 1)):
        raise damage_error(checkpoint.path, damaged)
    on_note(f"{checkpoint.path} is verified: {len(checksums)} files in {time.monotonic() - began:.3f} s")


def export_checkpoint(
    path: Path,
    target: Path,
    dtype: ExportDtype,
    largest_file_bytes: int,
    on_progress: OnProgress,
    on_note: OnNote,
    *,
    verify: bool,
) -> None:
    """Writes the weights of the checkpoint at ``path`` as a Hugging Face model into the new folder ``target``.

    Raises UsageError where one of them is not fit, EnvironmentProblem where there is no room.
    """
    checkpoint, target = read_checkpoint(path), target.absolute()
    model = checkpoint.record.model
    config_of(model, dtype)  # a model without a form there is rejected before any work
    _check_target(target, model, BYTES[dtype])
    if verify:
        verify_saved(checkpoint, on_note)
    with new_folder(target) as folder:
        job = ExportJob(
            checkpoint=str(checkpoint.path),
            folder=str(folder),
            model=model,
            dtype=dtype,
            largest_file_bytes=largest_file_bytes,
        )
        run_converter(job, on_progress, on_note)


def import_checkpoint(
    path: Path, target: Path, workload: str, model: Model, on_progress: OnProgress, on_note: OnNote
) -> None:
    """Makes the new checkpoint ``target``, of weights alone, from the Hugging Face model of ``model`` at ``path``.

    Raises UsageError where the folder holds something else, EnvironmentProblem where there is no room.
    """
    source, target = read_folder(path), target.absolute()
    check_config(source, model)
    _check_target(target, model, BYTES["fp32"])
    with new_folder(target) as folder:
        job = ImportJob(source=str(source.path), files=source.files, folder=str(folder), model=model)
        checksums = run_converter(job, on_progress, on_note)
        record = imported_record(source, workload, model, folder, checksums)
        write_atomically(folder / RECORD, record.model_dump_json(indent=2) + "\n")


def check_config(source: HuggingFaceFolder, model: Model) -> None:
    """Raises UsageError if the configuration is of another model, or may be: with keys that are not understood."""
    name, where = f"{model.model} {model.size}", str(source.path / CONFIG)
    if differences := list(config_differences(model, source.config)):
        what = f"this is another model than {name}:\n{_lines(differences)}"
        raise UsageError(what, where=where, do="give its workload and size with -w and -s; see 'llmb list'")
    if unknown := list(unknown_keys(model, source.config)):
        what = f"the configuration has unknown keys, which may change the model:\n{_lines(unknown)}"
        raise UsageError(what, where=where, do=f"remove them if the model is {name} without them, too")


def _lines(items: Sequence[str]) -> str:
    shown = [f"  - {item}" for item in items[:MOST_PROBLEMS]]
    return "\n".join([*shown, *([f"  - and {len(items) - MOST_PROBLEMS} more"] if items[MOST_PROBLEMS:] else [])])


def imported_record(
    source: HuggingFaceFolder, workload: str, model: Model, folder: Path, checksums: Checksums
) -> CheckpointRecord:
    return CheckpointRecord(
        llmb_version=__version__,
        saved_at=now(),
        workload=workload,
        size=model.size,
        dtype=None,
        model=model,
        layout=None,
        training=None,
        seed=None,
        step=0,
        consumed_samples=0,
        optimizer_state=False,
        imported_from=Origin(format="huggingface", path=str(source.path), files=source.files),
        files={f"{WEIGHTS}/{name}": (folder / WEIGHTS / name).stat().st_size for name in sorted(checksums)},
        crc32={f"{WEIGHTS}/{name}": checksum for name, checksum in sorted(checksums.items())},
    )


def _check_target(target: Path, model: Model, bytes_each: int) -> None:
    check_converter()
    check_free(target)
    check_weights_space(model, bytes_each, target)

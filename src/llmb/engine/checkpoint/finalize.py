# SPDX-License-Identifier: Apache-2.0
"""Finalizes a checkpoint: writes its record, then renames its folder. Before that it is not a checkpoint."""

import shutil
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from llmb import __version__
from llmb.runs.checkpoint import RECORD, WEIGHTS, CheckpointRecord, partial_path
from llmb.runs.folder import write_atomically
from llmb.runs.new_folder import flush_folder
from llmb.runs.plan import Plan
from llmb.runs.record import now


def finalize(plan: Plan, step: int, path: Path, metadata: Metadata) -> None:
    """Writes the record of the checkpoint that all ranks wrote, and renames its folder.

    The content of every file is on disk before. Raises OSError, also if files of other ranks are not visible here.
    """
    partial = partial_path(path)
    files = {f"{WEIGHTS}/{file.name}": file.stat().st_size for file in sorted((partial / WEIGHTS).iterdir())}
    for info in metadata.storage_data.values():
        if f"{WEIGHTS}/{info.relative_path}" not in files:
            raise OSError(f"{info.relative_path} is missing: all nodes need to see the same folder")
    flush_folder(partial / WEIGHTS)
    record = checkpoint_record(plan, step, files)
    write_atomically(partial / RECORD, record.model_dump_json(indent=2) + "\n")
    flush_folder(partial)
    partial.rename(path)
    flush_folder(path.parent)


def checkpoint_record(plan: Plan, step: int, files: dict[str, int]) -> CheckpointRecord:
    recipe = plan.recipe
    return CheckpointRecord(
        llmb_version=__version__,
        saved_at=now(),
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        model=recipe.model,
        layout=recipe.layout,
        training=recipe.training,
        seed=plan.seed,
        step=step,
        consumed_samples=plan.samples_before(step),
        files=files,
    )


def discard(path: Path) -> None:
    """Frees the space of a checkpoint that could not be completed."""
    shutil.rmtree(partial_path(path), ignore_errors=True)

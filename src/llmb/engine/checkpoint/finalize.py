# SPDX-License-Identifier: Apache-2.0
"""Finalizes a checkpoint: writes its record, then renames its folder. Before that it is not a checkpoint."""

import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llmb import __version__
from llmb.checkpoints.checkpoint import RECORD, WEIGHTS, CheckpointRecord, partial_path
from llmb.checkpoints.new_folder import flush_folder
from llmb.checkpoints.origin import WeightsOrigin
from llmb.runs.folder import write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record import now

DISCARDED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02


def finalize(plan: Plan, step: int, path: Path, checksums: Mapping[str, str], base: WeightsOrigin | None) -> None:
    """Writes the record of the checkpoint that all ranks wrote, and renames its folder.

    ``checksums`` are those of the files in ``weights``, by name; ``base`` are the frozen weights of adapters. The
    content of every file is on disk before. Raises OSError, also if files of other ranks are not visible here.
    """
    partial = partial_path(path)
    sizes = {file.name: file.stat().st_size for file in (partial / WEIGHTS).iterdir()}
    if missing := sorted(checksums.keys() - sizes.keys()):
        raise OSError(f"{missing[0]} is missing: all nodes need to see the same folder")
    for left in sizes.keys() - checksums.keys():  # by a save that was interrupted, and had more ranks
        (partial / WEIGHTS / left).unlink()
    files = {f"{WEIGHTS}/{name}": sizes[name] for name in sorted(checksums)}
    crc32 = {f"{WEIGHTS}/{name}": checksum for name, checksum in sorted(checksums.items())}
    flush_folder(partial / WEIGHTS)
    record = checkpoint_record(plan, step, files, crc32, base)
    write_atomically(partial / RECORD, record.model_dump_json(indent=2) + "\n")
    flush_folder(partial)
    partial.rename(path)
    flush_folder(path.parent)


def checkpoint_record(
    plan: Plan, step: int, files: dict[str, int], crc32: dict[str, str], base: WeightsOrigin | None
) -> CheckpointRecord:
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
        dataset=plan.dataset.packed if plan.dataset else None,
        origin=plan.origin,
        lora=plan.lora,
        base=base,
        files=files,
        crc32=crc32,
    )


def discard(path: Path) -> None:
    """Frees the space of a checkpoint that could not be completed."""
    shutil.rmtree(partial_path(path), ignore_errors=True)


def await_discarded(path: Path) -> None:
    """Returns when another rank has discarded it, or after a while: as soon as one rank ends, the launcher ends all.

    Nor is a folder waited for that can no longer be looked at.
    """
    end = time.monotonic() + DISCARDED_WITHIN_S
    with suppress(OSError):
        while partial_path(path).exists() and time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)

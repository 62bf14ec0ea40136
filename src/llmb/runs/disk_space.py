# SPDX-License-Identifier: Apache-2.0
"""Checks that the disk has space for a run's checkpoints."""

import shutil
from pathlib import Path

from llmb.catalogue.records import Model
from llmb.errors import EnvironmentProblem
from llmb.metrics.parameters import checkpoint_bytes, parameter_count
from llmb.runs.plan import Plan

GB = 10**9


def check_space(plan: Plan, folder: Path) -> None:
    """Raises EnvironmentProblem if the checkpoints of ``plan`` do not all fit on the disk of ``folder``.

    ``folder`` need not exist yet.
    """
    count = sum(map(plan.saves_after, range(plan.first_step, plan.last_step + 1)))
    if not count:
        return
    plural = "checkpoint needs" if count == 1 else "checkpoints need"
    advice = "free some space, set LLMB_INSTALL to a folder on another disk, or save less often"
    check_room(f"{count} {plural}", count * checkpoint_bytes(plan.recipe.model, plan.lora), folder, advice)


def check_weights_space(model: Model, bytes_each: int, folder: Path) -> None:
    """Raises EnvironmentProblem if the weights of ``model`` alone do not fit on the disk of ``folder``."""
    need = bytes_each * parameter_count(model)[0]
    check_room("the weights need", need, folder, "free some space, or give a folder on another disk")


def check_room(what: str, need: int, folder: Path, advice: str) -> None:
    """Raises EnvironmentProblem if the disk has less than ``need`` bytes free. ``folder`` need not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    have = shutil.disk_usage(existing).free
    if need > have:
        raise EnvironmentProblem(
            f"{what} about {_gb(need)}; the disk has {_gb(have)} free", where=str(folder), do=advice
        )


def _gb(size: int) -> str:
    return f"{size / GB:,.0f} GB" if size >= 100 * GB else f"{size / GB:.3g} GB"

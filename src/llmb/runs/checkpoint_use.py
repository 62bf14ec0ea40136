# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the weights that it starts with, and space on disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, UsageError, itemized
from llmb.catalogue.records import Model
from llmb.catalogue.throughput import checkpoint_bytes, parameter_count
from llmb.runs.checkpoints.checkpoint import (
    CheckpointRecord,
    model_differences,
    read_checkpoint,
    read_checkpoint_record,
)
from llmb.runs.checkpoints.origin import WeightsOrigin, identity_of
from llmb.runs.plan import Plan

GB = 10**9


def check_space(plan: Plan, folder: Path) -> None:
    """Raise EnvironmentProblem if the checkpoints of ``plan`` do not all fit on the disk of ``folder``.

    ``folder`` need not exist yet.
    """
    count = sum(map(plan.saves_after, range(plan.first_step, plan.last_step + 1)))
    if not count:
        return
    plural = "checkpoint needs" if count == 1 else "checkpoints need"
    advice = "free some space, set LLMB_INSTALL to a folder on another disk, or save less often"
    check_room(f"{count} {plural}", count * checkpoint_bytes(plan.recipe.model, plan.lora), folder, advice)


def check_weights_space(model: Model, bytes_each: int, folder: Path) -> None:
    """Raise EnvironmentProblem if the weights of ``model`` alone do not fit on the disk of ``folder``."""
    need = bytes_each * parameter_count(model)[0]
    check_room("the weights need", need, folder, "free some space, or give a folder on another disk")


def check_room(what: str, need: int, folder: Path, advice: str) -> None:
    """Raise EnvironmentProblem if the disk has less than ``need`` bytes free. ``folder`` need not exist yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    have = shutil.disk_usage(existing).free
    if need > have:
        raise EnvironmentProblem(
            f"{what} about {_gb(need)}; the disk has {_gb(have)} free", where=str(folder), do=advice
        )


def _gb(size: int) -> str:
    return f"{size / GB:,.0f} GB" if size >= 100 * GB else f"{size / GB:.3g} GB"


def loads_weights(plan: Plan) -> bool:
    """Return whether the run reads ``plan.weights``: adapters resume beside them, everything else instead of them."""
    return plan.weights is not None and (plan.start is None or plan.lora is not None)


def check_weights(plan: Plan) -> None:
    """Raise UsageError if the weights that ``plan`` starts with are missing or incomplete, or do not fit the run."""
    if plan.weights is not None and loads_weights(plan):
        checkpoint = read_checkpoint(Path(plan.weights.path))
        if problems := list(weights_problems(plan, checkpoint.record)):
            raise UsageError(f"a run cannot start with these weights:{itemized(problems)}", where=plan.weights.path)
    if plan.lora and plan.start:
        recorded, base = read_checkpoint_record(Path(plan.start.path)).base, base_weights(plan)
        if recorded and base and (problem := base_problem(recorded, base)):
            raise UsageError(problem, where=plan.start.path, do="give the weights that the adapters were trained with")


def weights_problems(plan: Plan, record: CheckpointRecord) -> Iterator[str]:
    """Why the weights of a checkpoint cannot be those of the plan's model. Pure."""
    if record.lora:
        yield "the checkpoint contains only adapters; 'llmb checkpoint export --merge' merges them into their base"
    for difference in model_differences(plan.recipe.model, record.model):
        yield f"the checkpoint is of another model: {difference}"


def base_weights(plan: Plan) -> WeightsOrigin | None:
    """The frozen weights of a run with adapters; None for a run that trains all weights.

    Raises UsageError if the checkpoint cannot be read.
    """
    if plan.lora is None:
        return None
    if plan.weights is None:
        return WeightsOrigin(kind="random")
    record = read_checkpoint_record(Path(plan.weights.path))
    path, name = plan.weights.path, plan.weights.name
    return WeightsOrigin(kind="checkpoint", path=path, name=name, identity=identity_of(record.crc32))


def base_problem(recorded: WeightsOrigin, base: WeightsOrigin) -> str | None:
    """Why adapters of ``recorded`` weights cannot be used with ``base``; None if they can. Pure."""
    belong = f"these adapters belong to {base_text(recorded)}"
    if recorded.kind != base.kind:
        return f"{belong}, but the run has {base_text(base)}"
    if recorded.identity and base.identity and recorded.identity != base.identity:
        return f"{belong} with the identity {recorded.identity}, but those in {base.path} have {base.identity}"
    return None


def base_text(base: WeightsOrigin) -> str:
    return "random weights" if base.path is None else f"the weights of {base.name} in {base.path}"

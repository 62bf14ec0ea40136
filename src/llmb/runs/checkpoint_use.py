# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: the weights that it starts with, the time of saves and loads, and space on disk."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, UsageError, itemized
from llmb.base.missing import Missing
from llmb.catalogue.records import Model
from llmb.catalogue.throughput import checkpoint_bytes, parameter_count
from llmb.runs.checkpoints.checkpoint import (
    CheckpointRecord,
    model_differences,
    read_checkpoint,
    read_checkpoint_record,
    read_checkpoint_times,
    saved_checkpoints,
)
from llmb.runs.checkpoints.checkpoint_files import Verification
from llmb.runs.checkpoints.origin import WeightsOrigin, identity_of
from llmb.runs.folder import RunFolder, read_or_missing
from llmb.runs.plan import Plan
from llmb.runs.steps import Step

GB = 10**9


def check_space(plan: Plan, folder: Path) -> None:
    """Raise EnvironmentProblem if the disk of ``folder`` has no room for all checkpoints of ``plan``."""
    count = sum(map(plan.saves_after, range(plan.first_step, plan.last_step + 1)))
    if not count:
        return
    plural = "checkpoint needs" if count == 1 else "checkpoints need"
    advice = "free some space, pass --checkpoint-dir with a folder on another disk, or save fewer checkpoints"
    check_room(f"{count} {plural}", count * checkpoint_bytes(plan.recipe.model, plan.lora), folder, advice)


def check_weights_space(model: Model, bytes_each: int, folder: Path) -> None:
    """Raise EnvironmentProblem if ``bytes_each`` per parameter of ``model`` do not fit on the disk of ``folder``."""
    need = bytes_each * parameter_count(model)[0]
    check_room("the weights need", need, folder, "free some space, or use a folder on another disk")


def check_room(what: str, need: int, folder: Path, advice: str) -> None:
    """Raise EnvironmentProblem if less than ``need`` bytes are free on the disk of ``folder``, which need not exist."""
    existing = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
    have = shutil.disk_usage(existing).free
    if need > have:
        raise EnvironmentProblem(
            f"{what} about {_gb(need)}; the disk has {_gb(have)} free", where=str(folder), do=advice
        )


def _gb(size: int) -> str:
    return f"{size / GB:,.0f} GB" if size >= 100 * GB else f"{size / GB:.3g} GB"


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Seconds that each save and the last load took, and the newest checkpoint; overlapped steps ran during saves."""

    save_s: tuple[float, ...]
    load_s: float | None
    size_bytes: int | None
    path: str | None
    overlapped_steps: int
    overlapped_steps_in_window: int
    verification: Verification | None = None
    """Verification of the loaded checkpoint; None if none was loaded."""
    verify_s: float | None = None
    """Time of the verification, in addition to ``load_s``; None if nothing was verified."""
    save_gb_per_s: float | None = None
    """Rate of the slowest save over all ranks (10^9 bytes per second); None if unknown or nothing was saved."""
    slowest_save_rank: int | None = None
    """The rank with the longest transfer in the slowest save; None if it is unknown or nothing was saved."""
    load_gb_per_s: float | None = None
    """Rate of the load (10^9 bytes per second)."""
    slowest_load_rank: int | None = None


def report_checkpoints(folder: RunFolder, plan: Plan, steps: Sequence[Step]) -> CheckpointReport | Missing | None:
    """Report on a run's checkpoints; return Missing if their times are unreadable, None if none is loaded or saved."""
    if not plan.save_checkpoint and plan.start is None and plan.weights is None:
        return None
    return read_or_missing("the times of checkpoints", lambda: _report(folder, plan, steps))


def _report(folder: RunFolder, plan: Plan, steps: Sequence[Step]) -> CheckpointReport:
    times = read_checkpoint_times(folder.checkpoint_times) if folder.checkpoint_times.exists() else []
    load = next((time for time in reversed(times) if time.kind == "load"), None)
    newest = next(reversed(saved_checkpoints(folder.checkpoints_of(plan))), None)
    saves = [time for time in times if time.kind == "save"]
    slowest = max(saves, key=lambda time: time.duration_s, default=None)
    overlapped = [step.step for step in steps if step.saving]
    return CheckpointReport(
        save_s=tuple(time.duration_s for time in saves),
        load_s=load.duration_s if load else None,
        size_bytes=newest.size_bytes if newest else None,
        path=str(newest.path) if newest else None,
        overlapped_steps=len(overlapped),
        overlapped_steps_in_window=sum(step in plan.window for step in overlapped),
        verification=load.verification if load else None,
        verify_s=load.verify_s if load else None,
        save_gb_per_s=slowest.gb_per_s if slowest else None,
        slowest_save_rank=slowest.slowest.rank if slowest and slowest.slowest else None,
        load_gb_per_s=load.gb_per_s if load else None,
        slowest_load_rank=load.slowest.rank if load and load.slowest else None,
    )


def loads_weights(plan: Plan) -> bool:
    """Return whether the run loads ``plan.weights``."""
    return plan.weights is not None and (plan.start is None or plan.lora is not None)


def check_weights(plan: Plan) -> None:
    """Raise UsageError or OSError if initial weights, or adapters to resume from, are unreadable or do not match."""
    if plan.weights is not None and loads_weights(plan):
        checkpoint = read_checkpoint(Path(plan.weights.path))
        if problems := list(weights_problems(plan, checkpoint.record)):
            what, do = f"this run cannot start with these weights:{itemized(problems)}", "pass others with --weights"
            raise UsageError(what, where=plan.weights.path, do=do)
    if plan.lora and plan.start:
        recorded, base = read_checkpoint_record(Path(plan.start.path)).base, base_weights(plan)
        if recorded and base and (problem := base_problem(recorded, base)):
            do = "pass --weights with the checkpoint that the adapters were trained on"
            raise UsageError(problem, where=plan.start.path, do=do)


def weights_problems(plan: Plan, record: CheckpointRecord) -> Iterator[str]:
    """Yield reasons why a run of ``plan`` cannot start with the weights of a checkpoint. Pure."""
    if record.lora:
        merge = "merge them into their base with 'llmb checkpoint export --merge', then import the result"
        yield f"the checkpoint contains only adapters; {merge} with 'llmb checkpoint import'"
    for difference in model_differences(plan.recipe.model, record.model):
        yield f"the checkpoint is of another model: {difference}"


def base_weights(plan: Plan) -> WeightsOrigin | None:
    """Return the origin of the frozen weights of a run with adapters, else None.

    Raise UsageError or OSError if unreadable.
    """
    if plan.lora is None:
        return None
    if plan.weights is None:
        return WeightsOrigin(kind="random")
    record = read_checkpoint_record(Path(plan.weights.path))
    path, name = plan.weights.path, plan.weights.name
    return WeightsOrigin(kind="checkpoint", path=path, name=name, identity=identity_of(record.crc32))


def base_problem(recorded: WeightsOrigin, base: WeightsOrigin) -> str | None:
    """Return why adapters trained on ``recorded`` weights cannot be used with ``base``; None if they can. Pure."""
    belong = f"these adapters belong to {base_text(recorded)}"
    if recorded.kind != base.kind:
        return f"{belong}, but the run has {base_text(base)}"
    if recorded.identity and base.identity and recorded.identity != base.identity:
        return f"{belong} with the identity {recorded.identity}, but those in {base.path} have {base.identity}"
    return None


def base_text(base: WeightsOrigin) -> str:
    return "random weights" if base.path is None else f"the weights of {base.name} in {base.path}"

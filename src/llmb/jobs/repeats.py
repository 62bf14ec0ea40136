# SPDX-License-Identifier: Apache-2.0
"""Repeats of several recipes on this machine: their order, and those of them that were run before."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llmb.errors import EnvironmentProblem, UsageError
from llmb.jobs.history import read_history
from llmb.jobs.job import Job
from llmb.jobs.local_run import LocalRun
from llmb.jobs.locks import file_lock
from llmb.jobs.store import Filter
from llmb.programs.conclude import EndedRun, read_ended_run
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import ENGINE
from llmb.runs.recorded_identity import identity_of_plan
from llmb.trust import STATE_FOLDER

LOCK_DIGITS = 16
Say = Callable[[str], None]


class Turn(NamedTuple):
    """``recipe`` counts from 0, ``repeat`` from 1."""

    recipe: int
    repeat: int


def interleaved(recipes: int, repeats: int) -> Iterator[Turn]:
    """Each recipe once in every round, and every second round backwards (A B B A ...): what drifts while they run,
    such as the temperature, then adds the same to the mean of each."""
    for repeat in range(1, repeats + 1):
        order = range(recipes) if repeat % 2 else reversed(range(recipes))
        yield from (Turn(recipe, repeat) for recipe in order)


def remaining(turns: Iterator[Turn], done: Mapping[int, int]) -> list[Turn]:
    """Without the first repeats of a recipe, of which ``done`` have ended before."""
    return [turn for turn in turns if turn.repeat > done.get(turn.recipe, 0)]


def earlier_runs(local: LocalRun, say: Say) -> list[EndedRun]:
    """Successful repeats of ``local`` with its label, each once, in their order; none without a label."""
    if local.label is None:
        return []
    selection = Filter(label=local.label, states=("success",), runs_only=True)
    with read_history(local.install, say) as store:
        jobs = store.jobs(selection)
    own = identity_of_plan(local.plan, ENGINE, {}).key
    runs = [run for job in jobs if job.identity == own and (run := _ended(job)) and _repeats(run.plan, local.plan)]
    return list({run.record.run_id: run for run in reversed(runs)}.values())[::-1]


@contextmanager
def turn_of(local: LocalRun, say: Say) -> Iterator[None]:
    """Held while one repeat runs: a second client with the same label waits, so that they neither measure each other
    nor repeat what the other one has run. Without a label there is nothing to share."""
    if local.label is None:
        yield
        return
    name = hashlib.sha256(local.label.encode()).hexdigest()[:LOCK_DIGITS]
    path = local.install / STATE_FOLDER / f"repeats-{name}.lock"
    waits = f"another client runs repeats with the label '{local.label}'; this one waits for its turn"
    with file_lock(path, math.inf, "running repeats", on_wait=lambda: say(waits)):
        yield


def _ended(job: Job) -> EndedRun | None:
    """None if its folder is gone, or cannot be read."""
    folder = RunFolder(Path(job.run_dir))
    try:
        return read_ended_run(folder)
    except (UsageError, EnvironmentProblem):
        return None


def _repeats(one: Plan, other: Plan) -> bool:
    """Whether runs of the same identity have the same steps too, and the same of them are measured."""
    return _measured(one) == _measured(other)


def _measured(plan: Plan) -> tuple[int, ...]:
    return plan.first_step, plan.steps, plan.seed, plan.window.first, plan.window.last

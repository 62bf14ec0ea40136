# SPDX-License-Identifier: Apache-2.0
"""Starts of one run: a scheduler may start its job again, and it then resumes from its last checkpoint.

Nothing of an earlier attempt is lost: its steps stay in a file of its own, its log in the run's log, its nodes and its
end in the record. ``metrics.jsonl`` has every step of the run once, from the last attempt that trained it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from llmb.base.errors import InfrastructureError, UsageError
from llmb.catalogue.records import Window
from llmb.catalogue.window import STEADY, resolve_window
from llmb.readers.anomalies import NO_STEADY_STATE, steady_window
from llmb.readers.samples.samples import discard_settings
from llmb.runs.checkpoints.checkpoint import RECORD, SavedCheckpoint, checkpoint_name, saved_checkpoints
from llmb.runs.failure import ATTEMPT
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record import Attempt, BegunJob, JobEnd, RunRecord, now, read_job_end, write_record
from llmb.runs.steps import Step, read_steps, step_to_json

AnyPlan = TypeVar("AnyPlan", bound=Plan)


def begin_attempt(folder: RunFolder, record: RunRecord, job: BegunJob) -> RunRecord:
    """Prepares the run for its next start by ``job``, and writes the record that the workers will read.

    Raises InfrastructureError if the run has no retries left, OSError if nothing can be written.
    """
    number = len(record.attempts) + 1
    if record.retries and number > record.retries + 1:
        raise InfrastructureError(
            f"the run was started {number - 1} times, and may be retried {record.retries} times only",
            where=str(folder.path),
            do="look for what its nodes have in common: 'llmb jobs nodes'; then submit it again",
        )
    if number == 1:
        first_step, checkpoint = record.plan.first_step, None
    else:
        newest = newest_checkpoint(folder, record.plan)
        checkpoint = newest.path if newest else None
        first_step = newest.record.step if newest else record.plan.first_step
        _keep_steps(folder, number - 1, first_step)
    attempt = Attempt(number=number, started_at=now(), job=job, first_step=first_step, checkpoint=_text(checkpoint))
    begun = record.model_copy(
        update={
            **dict.fromkeys(("reason", "exit_code", "ended_at", "environment", "vboost", "result")),
            "status": "running",
            "started_at": record.started_at or attempt.started_at,
            "job": job,
            "plan": with_window(record.plan, first_step),
            "attempts": (*_ended(record.attempts, _left_end(folder)), attempt),
        }
    )
    write_record(folder, begun)
    folder.job_end.unlink(missing_ok=True)
    if number > 1:
        folder.stall.unlink(missing_ok=True)
        folder.environment.unlink(missing_ok=True)
        folder.vboost.unlink(missing_ok=True)
        discard_settings(folder.resources)
        with folder.log.open("a") as log:
            log.write(attempt_line(attempt) + "\n")
    return begun


def newest_checkpoint(folder: RunFolder, plan: Plan) -> SavedCheckpoint | None:
    """The last complete checkpoint that this run has saved."""
    checkpoints = saved_checkpoints(folder.checkpoints_of(plan))
    return checkpoints[-1] if checkpoints else None


def with_window(plan: AnyPlan, first_step: int) -> AnyPlan:
    """Statistics are of one attempt: one that begins before the window's end has a warm-up and a window of its own.

    A window that is given by its steps stays: the result reports that it was cut.
    """
    if not plan.first_step < first_step <= plan.window.last:
        return plan
    try:
        steps, documented = plan.last_step - first_step + 1, plan.recipe.documented_window
        window = resolve_window(plan.window.rule, steps, first_step, documented)
    except UsageError:
        return plan
    return plan.model_copy(update={"window": window})


def with_steady_window(record: RunRecord, steps: Sequence[Step]) -> tuple[RunRecord, str | None]:
    """The record with the window that statistics are of, and why there is none."""
    plan = record.plan
    if plan.window.rule != STEADY:
        return record, None
    steady = _steady(max(_attempts(record, steps), key=len)[1:])  # the first step of an attempt includes warm-up
    if steady is None:
        return record, NO_STEADY_STATE
    return record.model_copy(update={"plan": plan.model_copy(update={"window": steady})}), None


def _attempts(record: RunRecord, steps: Sequence[Step]) -> list[list[Step]]:
    """The steps by the attempt that trained them last, without profiled ones."""
    rest = [step for step in steps if not step.profiled]
    parts = []
    for attempt in reversed(record.attempts):
        parts.append([step for step in rest if step.step >= attempt.first_step])
        rest = [step for step in rest if step.step < attempt.first_step]
    return [*parts, rest]


def _steady(steps: Sequence[Step]) -> Window | None:
    """Steps that are left out of ``steps`` may lie inside of the window."""
    steady = steady_window([step.step_time_s for step in steps], 0)
    if steady is None:
        return None
    return Window(first=steps[steady.first].step, last=steps[steady.last].step, rule=STEADY)


def split_window_reason(record: RunRecord) -> str | None:
    """Why the window holds steps of more than one attempt; else None."""
    window = record.plan.window
    for attempt in record.attempts[1:]:
        if window.first < attempt.first_step <= window.last:
            steps = f"{window.first}-{window.last}"
            return f"attempt {attempt.number} began at step {attempt.first_step}, in the window {steps}"
    return None


def window_began(record: RunRecord) -> int:
    """The first step of the attempt that trained the first step of the window."""
    first = record.plan.window.first
    begun = (attempt.first_step for attempt in reversed(record.attempts))
    return next((step for step in begun if step <= first), record.plan.first_step)


def is_done(folder: RunFolder, plan: Plan) -> bool:
    """Return whether every step is done, and saved if requested: from here the run is complete whatever ends it."""
    if len(read_steps(folder.steps)) < plan.steps:
        return False
    last = checkpoint_name(plan.last_step + 1, plan.samples_before(plan.last_step + 1))
    return not plan.save_checkpoint or (folder.checkpoints_of(plan) / last / RECORD).is_file()


def attempt_line(attempt: Attempt) -> str:
    """Return the first line of an attempt's part of the log."""
    where = f"from {attempt.checkpoint}" if attempt.checkpoint else "no checkpoint was saved before"
    return f"{ATTEMPT}{attempt.number} begins at step {attempt.first_step} on {attempt.job.nodes}, {where}"


def _keep_steps(folder: RunFolder, number: int, first_step: int) -> None:
    """Copies the steps of attempt ``number`` to their own file, and keeps those that the next one does not repeat."""
    if not folder.steps.exists():
        return
    path = folder.steps_of_attempt(number)
    if not path.exists():  # else this start was itself interrupted here, and the steps were kept before
        write_atomically(path, folder.steps.read_text())
    lines = [step_to_json(step) for step in read_steps(path) if step.step < first_step]
    write_atomically(folder.steps, "".join(f"{line}\n" for line in lines))


def _left_end(folder: RunFolder) -> JobEnd | None:
    """None if the end was not recorded, or not completely."""
    try:
        return read_job_end(folder)
    except ValueError:
        return None


def _ended(attempts: tuple[Attempt, ...], end: JobEnd | None) -> tuple[Attempt, ...]:
    """The attempts so far, the last one with its end, if that was recorded."""
    if (
        end is None
        or not attempts
        or (end.job_id, end.restarts) != (attempts[-1].job.job_id, attempts[-1].job.restarts)
    ):
        return attempts
    last = attempts[-1].model_copy(
        update={"ended_at": end.ended_at, "exit_code": end.exit_code, "signal": end.signal or None}
    )
    return (*attempts[:-1], last)


def _text(path: Path | None) -> str | None:
    return str(path) if path else None

# SPDX-License-Identifier: Apache-2.0
"""``run.json``: all inputs of a run, its result and its attempts; also the records of its job."""

import errno
import hashlib
import secrets
import shlex
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, WrapValidator, model_validator

from llmb import __version__
from llmb.base.errors import InfrastructureError, UsageError
from llmb.base.missing import Missing
from llmb.base.record import ReasonedRecord, ValidateOnce
from llmb.base.trust import foreign_link
from llmb.catalogue.records import Record, Window
from llmb.catalogue.window import resolve_window
from llmb.readers.samples.node_settings import NodesSettings
from llmb.readers.samples.samples import discard_settings
from llmb.runs.checkpoints.checkpoint import SavedCheckpoint, saved_checkpoints
from llmb.runs.checkpoints.origin import Origin
from llmb.runs.environment import Environment
from llmb.runs.experiment import ENGINE as ENGINE
from llmb.runs.folder import ATTEMPT, BrokenRecord, RunFolder, read_stored, write_atomically
from llmb.runs.plan import EnginePlan, Plan, Start
from llmb.runs.result import Result, Status
from llmb.runs.source_version import source_version
from llmb.runs.steps import read_steps, step_to_json

LETTERS = "klmnopqrstuvwxyz"
"""One letter per hexadecimal digit: an id cannot be mistaken for a job number, a date or a commit."""
_AS_LETTERS = str.maketrans("0123456789abcdef", LETTERS)
LENGTH = 8


def _time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"'{text}' is not a time") from error
    return text


Time = Annotated[str, AfterValidator(_time)]
"""A time in ISO 8601."""


def seconds_of(time: str | None) -> float | None:
    """Convert an ISO 8601 time to Unix time; return None for None."""
    return datetime.fromisoformat(time).timestamp() if time else None


class BegunJob(Record):
    """The job of one start of a run."""

    scheduler: str
    job_id: str
    nodes: str
    """The scheduler's list of nodes, such as ``node[1-2]``."""
    restarts: int = 0


class Attempt(Record):
    """One start of a run by a scheduler. Fields of its end may be None."""

    number: int
    started_at: Time
    job: BegunJob
    first_step: int
    checkpoint: str | None
    """The run's checkpoint that the attempt resumes from; None if it begins with the run's first step."""
    ended_at: Time | None = None
    exit_code: int | None = None
    signal: str | None = None


class Process(Record):
    """A process, distinguished from a later process with the same pid."""

    host: str
    pid: int
    started: str
    """The start time and, on Linux, an identifier of the boot that it is counted from; empty if unknown."""


LOCAL = "local"
"""The scheduler of runs started on this machine without a queue, and of imported runs."""


class SubmittedJob(Record):
    """The content of ``job.json``: the job that a run was submitted as."""

    schema_version: int = 1
    scheduler: str
    job_id: str
    cluster: str | None = None
    submitted_at: Time
    key: str = ""
    """The key in the history of jobs; empty until ``record_handle`` writes the file."""
    campaign: str | None = None
    retries: int = 0
    """The number of times that the run may be submitted again."""
    retry_of: str | None = None
    """Key of the job that this job repeats."""
    process: Process | None = None
    """The process of a job that runs without a scheduler; else None."""
    earlier: tuple["SubmittedJob", ...] = ()
    """The earlier jobs of the run."""


class JobEnd(Record):
    """The content of ``job_end.json``. ``signal`` is empty unless a signal ended the job."""

    job_id: str
    restarts: int
    exit_code: int
    signal: str
    ended_at: Time

    @property
    def ended_s(self) -> float:
        return datetime.fromisoformat(self.ended_at).timestamp()


class VboostOutcome(Record):
    """The result of ``nvidia-smi boost-slider --vboost``, which a job's batch script calls on its nodes."""

    level: int
    nodes_set: int
    nodes: int


class RunRecord(ReasonedRecord):
    """The content of ``run.json``. ``environment`` is from the workers: None until the run ends, or if it is absent."""

    schema_version: Literal[3] = 3
    """Lower versions were written by development versions before 0.1."""
    run_id: str
    """The run's own id, independent of its folder's name and place."""
    status: Status
    reason: str | None = None
    exit_code: int | None = None
    llmb_version: str = __version__
    llmb_commit: str | None = None
    """Git commit of llmb; None until the run starts, or if it is unknown."""
    llmb_modified: bool | None = None
    """True if llmb's source differed from ``llmb_commit``; None until the run starts, or if it is unknown."""
    llmb_commit_reason: str | None = None
    """The reason why ``llmb_commit`` or ``llmb_modified`` is unknown."""
    image: str | None = None
    """Container image that the workers run in; None if they run without a container."""
    label: str | None = None
    """A name that the user chose, to find and compare runs by."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """Arguments that the user passed to a framework's script, by name."""
    program: str = ENGINE
    """The program that trains."""
    started_at: Time | None
    """None until the run starts."""
    ended_at: Time | None = None
    command: tuple[str, ...]
    job: BegunJob | None = None
    """The job in which the run last started; None until it starts."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that ``llmb run`` set for the workers; empty for a submitted run."""
    retries: int = 0
    """The number of times that a scheduler may restart the run; 0 leaves that to the scheduler."""
    attempts: tuple[Attempt, ...] = ()
    """Starts of a run by a scheduler."""
    plan: Annotated[EnginePlan | Plan, WrapValidator(ValidateOnce())]
    origin: Annotated[Origin, WrapValidator(ValidateOnce())]
    """Origin of weights and data, as in the plan."""
    conventions: Annotated[dict[str, str], WrapValidator(ValidateOnce())]
    environment: Annotated[Environment, WrapValidator(ValidateOnce())] | Missing | None = None
    settings: Annotated[NodesSettings, WrapValidator(ValidateOnce())] | Missing = Missing("the run has not ended")
    """The settings of all nodes when the run began."""
    vboost: VboostOutcome | Missing | None = None
    """None for a job that does not set the boost, and while the job runs."""
    result: Result | None = None

    @model_validator(mode="after")
    def _ranks_have_work(self) -> Self:
        layout = self.plan.recipe.layout
        if not (layout.dp and layout.edp and layout.ga):
            what = f"{layout.gpus} GPUs or a global batch size of {layout.gbs}"
            raise ValueError(f"plan.recipe.layout: {what} is too small for the parallel sizes and the micro-batch size")
        return self

    @property
    def id(self) -> str:
        """The short id that commands accept and print; copies of the run share it."""
        return short_id(self.run_id)

    @property
    def window(self) -> Window:
        """The window of the statistics: the planned window unless the result has another."""
        return (self.result and self.result.window) or self.plan.window


CONVENTIONS = {
    "steps": "numbered from 0",
    "std": "sample standard deviation (n - 1)",
    "ci95": "95 % confidence interval of the mean of autocorrelated steps: EWC of n^(2/3) / 3 terms, Student's t",
    "TFLOPS_per_GPU in the log": "full",
    "peak_memory on a CPU": "largest resident set of the process",
}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_run_id() -> str:
    """Return a random id: two runs never share one."""
    return secrets.token_hex(8)


def queued_record(
    plan: Plan,
    command: tuple[str, ...],
    retries: int = 0,
    program: str = ENGINE,
    *,
    label: str | None = None,
    image: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> RunRecord:
    """Return the record of a run that a scheduler will start."""
    return RunRecord(
        run_id=new_run_id(),
        label=label,
        image=image,
        arguments=dict(arguments or {}),
        status="queued",
        program=program,
        started_at=None,
        command=command,
        retries=retries,
        plan=plan,
        origin=plan.origin,
        conventions=CONVENTIONS,
    )


def new_record(
    plan: Plan,
    command: tuple[str, ...],
    variables: Mapping[str, str] | None = None,
    job: BegunJob | None = None,
    *,
    label: str | None = None,
    image: str | None = None,
) -> RunRecord:
    """Return the record of a run that begins here and now."""
    begun = {"status": "running", "started_at": now(), "job": job, "variables": dict(variables or {})}
    queued = queued_record(plan, command, label=label, image=image)
    return queued.model_copy(update={**begun, **source_fields()})


def source_fields() -> dict[str, Any]:
    """Return the fields of a record that identify the running llmb."""
    source = source_version()
    return {
        "llmb_version": __version__,
        "llmb_commit": source.commit,
        "llmb_modified": source.modified,
        "llmb_commit_reason": source.reason,
    }


def engine_plan(record: RunRecord) -> EnginePlan:
    assert isinstance(record.plan, EnginePlan), f"this run is of {record.program}"
    return record.plan


def attempt_plan(record: RunRecord) -> EnginePlan:
    """Return the run's plan; if its latest attempt resumes from a checkpoint, the plan of the remaining steps."""
    plan, attempt = engine_plan(record), record.attempts[-1] if record.attempts else None
    if attempt is None or attempt.checkpoint is None:
        return plan
    consumed = plan.samples_before(attempt.first_step)
    start = Start(path=attempt.checkpoint, step=attempt.first_step, consumed_samples=consumed, origin=plan.origin)
    return plan.model_copy(update={"start": start, "steps": plan.last_step - attempt.first_step + 1})


def write_record(folder: RunFolder, record: RunRecord) -> None:
    write_atomically(folder.record, record.model_dump_json(indent=2) + "\n")


def _check_links(folder: RunFolder) -> None:
    if link := foreign_link(folder.path):
        raise PermissionError(errno.EPERM, "it is behind another user's link, which is not followed", str(link))


def read_record(folder: RunFolder) -> RunRecord:
    """Read the record; raise BrokenRecord if it is invalid, OSError if unreadable or behind another user's link."""
    _check_links(folder)
    return read_stored(folder.record, RunRecord)


def read_job(folder: RunFolder) -> SubmittedJob | None:
    """Read a run's job; None if no submission was recorded. Raise as ``read_record`` does."""
    _check_links(folder)
    return read_stored(folder.job, SubmittedJob) if folder.job.exists() else None


def read_job_if_whole(folder: RunFolder) -> SubmittedJob | None:
    """Read a run's job; None if there is none, or if it is unreadable."""
    try:
        return read_job(folder)
    except (OSError, BrokenRecord):
        return None


def read_job_end(folder: RunFolder) -> JobEnd | None:
    """Read the end of a job; None if the batch script recorded none. Raise BrokenRecord or OSError if unreadable."""
    return read_stored(folder.job_end, JobEnd) if folder.job_end.exists() else None


def unreadable_record(folder: RunFolder, error: OSError | ValueError) -> UsageError:
    """Return the error for an unreadable record of ``folder``."""
    why = error.strerror if isinstance(error, OSError) else getattr(error, "what", "it is damaged")
    do = None
    with suppress(OSError):
        command = f"llmb parse {shlex.quote(str(folder.log))}"
        do = f"to read the run's steps from its log, run {command}" if folder.log.is_file() else None
    return UsageError(f"the run's record cannot be read: {why}", where=str(folder.record), do=do)


def short_id(text: str) -> str:
    """Return the short id for a ``run_id``, or for the name or the path of an item without one."""
    digits = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:LENGTH]
    return digits.translate(_AS_LETTERS)


def may_be_short_id(text: str) -> bool:
    """Return whether ``text`` can be a short id, or the beginning of one."""
    return 0 < len(text) <= LENGTH and set(text) <= set(LETTERS)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def begin_attempt(folder: RunFolder, record: RunRecord, job: BegunJob) -> RunRecord:
    """Begin the run's next attempt.

    Raise InfrastructureError without a retry left, BrokenRecord or OSError for an unusable file.
    """
    number = len(record.attempts) + 1
    if record.retries and number > record.retries + 1:
        raise InfrastructureError(
            f"the run was started {number - 1} times, and its number of retries is limited to {record.retries}",
            where=str(folder.path),
            do="submit the run with more --retries, or without nodes that fail often ('llmb jobs nodes', --exclude)",
        )
    newest = newest_checkpoint(folder, record.plan) if number > 1 else None
    first_step, checkpoint = (newest.record.step, str(newest.path)) if newest else (record.plan.first_step, None)
    if number > 1:
        _keep_steps(folder, number - 1, first_step)
    attempt = Attempt(number=number, started_at=now(), job=job, first_step=first_step, checkpoint=checkpoint)
    begun = record.model_copy(
        update={
            **dict.fromkeys(("reason", "exit_code", "ended_at", "environment", "vboost", "result")),
            "status": "running",
            "started_at": record.started_at or attempt.started_at,
            "job": job,
            "plan": with_window(record.plan, first_step),
            "attempts": (*_ended_attempts(folder, record.attempts), attempt),
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
    """Return the last complete checkpoint that this run has saved; None if there is none."""
    checkpoints = saved_checkpoints(folder.checkpoints_of(plan))
    return checkpoints[-1] if checkpoints else None


def with_window(plan: AnyPlan, first_step: int) -> AnyPlan:
    """Return the plan for an attempt that starts at ``first_step``, with a new window if necessary."""
    if not plan.first_step < first_step <= plan.window.last:
        return plan
    try:
        steps, documented = plan.last_step - first_step + 1, plan.recipe.documented_window
        window = resolve_window(plan.window.rule, steps, first_step, documented)
    except UsageError:
        return plan
    return plan.model_copy(update={"window": window})


def attempt_line(attempt: Attempt) -> str:
    """Return the first line of an attempt's part of the log."""
    where = f"from {attempt.checkpoint}" if attempt.checkpoint else "no checkpoint was saved before"
    return f"{ATTEMPT}{attempt.number} begins at step {attempt.first_step} on {attempt.job.nodes}, {where}"


def _keep_steps(folder: RunFolder, number: int, first_step: int) -> None:
    if not folder.steps.exists():
        return
    path = folder.steps_of_attempt(number)
    if not path.exists():  # otherwise this start was interrupted here before, after it had copied the steps
        write_atomically(path, folder.steps.read_text())
    lines = [step_to_json(step) for step in read_steps(path) if step.step < first_step]
    write_atomically(folder.steps, "".join(f"{line}\n" for line in lines))


def _ended_attempts(folder: RunFolder, attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    try:
        end = read_job_end(folder)
    except ValueError:
        return attempts
    if not end or not attempts or (end.job_id, end.restarts) != (attempts[-1].job.job_id, attempts[-1].job.restarts):
        return attempts
    known = {"ended_at": end.ended_at, "exit_code": end.exit_code, "signal": end.signal or None}
    return (*attempts[:-1], attempts[-1].model_copy(update=known))

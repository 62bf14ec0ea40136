# SPDX-License-Identifier: Apache-2.0
"""Calls Slurm's own commands. One query or cancellation covers many jobs, to keep the load on the controller low."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.base.secrets import without_secrets
from llmb.base.shown_text import printable
from llmb.base.tools import Output, ask_program
from llmb.launch.slurm.job_state import (
    FIELD,
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    TIME_FORMAT,
    SlurmJob,
    parse_accounts,
    parse_queue,
)

TIME_OUT_S = 60
"""Time limit in seconds: commands wait 9 s for a controller that does not respond, and sbatch twice as long."""
AGAIN = "try again later; 'scontrol ping' shows whether Slurm's controller responds"
AGAIN_ACCOUNTS = "try again later; 'sacctmgr show cluster' shows whether Slurm's accounting responds"
DOWN = re.compile(
    r"Unable to contact|Zero Bytes|timed out|Connection refused|connection failure|Munge|authentication error", re.I
)
NO_CONFIGURATION = re.compile(
    r"establish a configuration source|Unable to process (configuration|slurm\.conf) file|cannot stat file", re.I
)
NO_JOB = "Invalid job id"
IDS_PER_CALL = 1000
NO_ACCOUNTS = "accounting storage is disabled"
SUBMITTED = re.compile(r"(?P<job_id>[0-9]{1,20})(?:;(?P<cluster>\S+))?", re.ASCII)
MOST_SHOWN = 80
SPEAKER = re.compile(r"^\w+: ((error|fatal): )?")
# SBATCH_ variables override the script, and a job would inherit the SLURM_ variables of the submitting job.
USER_TOKEN = "SLURM_JWT"  # noqa: S105 (its name, not a token)
PASSED_ON = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", USER_TOKEN)


def submit(
    script: Path,
    environ: Mapping[str, str],
    held: Sequence[int] = (),
    arguments: Sequence[str] = (),
    secrets: Collection[str] = (),
) -> tuple[str, str | None]:
    """Submit a script; return the job's id and, if Slurm manages several clusters, its cluster.

    sbatch inherits the file descriptors ``held``. ``arguments`` override the script's flags. Variables named in
    ``secrets`` are passed to the job. Raises UsageError if the script is rejected, InfrastructureError if sbatch prints
    no id, and the errors of ``call``.
    """
    variables = submitting_environment(environ, secrets)
    hidden = [not_exported(USER_TOKEN)] if USER_TOKEN in variables else []
    output = call(["sbatch", "--parsable", *hidden, *arguments, str(script)], variables, held=held)
    if output.code:
        do = "correct the options or settings; --dry-run, if the command has it, prints the batch script"
        raise UsageError(f"Slurm rejected the job: {message(output)}", do=do)
    match = SUBMITTED.fullmatch("".join(output.text.strip().splitlines()[-1:]))
    if match is None:
        what = f"sbatch printed no job id, but '{printable(output.text.strip()[:MOST_SHOWN])}'"
        raise InfrastructureError(what, do="run 'llmb jobs refresh', which finds the job if it was queued")
    return match["job_id"], match["cluster"]


def not_exported(name: str) -> str:
    """Return the flag of sbatch that makes a variable empty in the job."""
    return f"--export=ALL,{name}="


def call(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    time_out_s: float = TIME_OUT_S,
    held: Sequence[int] = (),
) -> Output:
    """Run one of Slurm's commands and return its output, even if the command fails.

    Raises EnvironmentProblem if it cannot run or Slurm is not configured, InfrastructureError if Slurm does not answer.
    """
    output = ask_program(command, time_out_s, environ=environ, held=held, cwd=None)
    if output.code == 0:
        return output
    problem, again = output.problem or "", AGAIN_ACCOUNTS if command[0].startswith("sacct") else AGAIN
    if output.not_here:
        do = "run llmb where Slurm's commands are installed, such as on a login node; or use 'llmb run' here"
        raise EnvironmentProblem(problem, do=do)
    _raise_unless_configured(output.errors)
    if output.timed_out:
        raise InfrastructureError(problem, do=again)
    if output.code is None:
        do = f"check the program at the path that 'command -v {command[0]}' prints, or use a login node of Slurm"
        raise EnvironmentProblem(problem, do=do)
    if DOWN.search(output.errors):
        raise InfrastructureError(f"Slurm does not answer: {message(output)}", do=again)
    return output


def _raise_unless_configured(errors: str) -> None:
    """Raise EnvironmentProblem if Slurm is not configured here, unless a controller that would configure it is down."""
    if NO_CONFIGURATION.search(errors) and not DOWN.search(errors):
        do = "run llmb where Slurm is configured, such as on a login node, or set SLURM_CONF to its slurm.conf"
        raise EnvironmentProblem(f"Slurm has no configuration on this machine: {last_lines(errors)}", do=do)


def submitting_environment(environ: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of sbatch, without variables that would override the script, and without secrets except
    the variables ``secrets`` and the user's token for Slurm."""
    harmless = {
        name: value
        for name, value in without_secrets(environ).items()
        if not name.startswith(("SBATCH_", "SLURM_", "SRUN_"))
    }
    return harmless | {name: environ[name] for name in (*PASSED_ON, *secrets) if name in environ}


def message(output: Output) -> str:
    return last_lines(output.errors) or f"exit code {output.code} with no output"


def last_lines(text: str) -> str:
    return "; ".join([SPEAKER.sub("", line.strip()) for line in text.splitlines() if line.strip()][-3:])


def controller_states(job_ids: Sequence[str], time_out_s: float = TIME_OUT_S) -> dict[str, SlurmJob]:
    """Return the states of jobs that the controller has; raise InfrastructureError if squeue fails, and the errors of
    ``call``."""
    jobs: dict[str, SlurmJob] = {}
    for ids in _batches(job_ids):
        # squeue fails for a single unknown id, but ignores unknown ones among several.
        jobs.update(_queue(["-j", ids], time_out_s))
    return {job_id: jobs[job_id] for job_id in job_ids if job_id in jobs}


def user_jobs(time_out_s: float = TIME_OUT_S) -> list[SlurmJob]:
    """Return all of this user's jobs that the controller still has."""
    return list(_queue(["--me"], time_out_s).values())


def accounted_states(job_ids: Sequence[str], time_out_s: float = TIME_OUT_S) -> dict[str, SlurmJob]:
    """Return the states of jobs from accounting, which may lag behind; an empty dictionary without accounting.

    Raises InfrastructureError if sacct fails, and the errors of ``call``.
    """
    jobs: dict[str, SlurmJob] = {}
    for ids in _batches(job_ids):
        output, accounts = _accounts(["-j", ids], time_out_s)
        if output.code and NO_ACCOUNTS in output.errors:
            return {}
        _check(output, "accounting does not answer")
        jobs.update(accounts)
    return {job_id: jobs[job_id] for job_id in job_ids if job_id in jobs}


def user_accounts(since_s: float, time_out_s: float = TIME_OUT_S) -> list[SlurmJob]:
    """Return this user's jobs that accounting lists from a minute before ``since_s`` (seconds since 1970) on; an empty
    list if sacct fails. Raises the errors of ``call``."""
    since = datetime.fromtimestamp(since_s - 60).strftime("%Y-%m-%dT%H:%M:%S")  # Slurm expects local time
    output, accounts = _accounts(["-S", since], time_out_s)
    return list(accounts.values()) if output.code == 0 else []


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancel jobs, ignoring ended jobs; raise UsageError if a job cannot be cancelled, and the errors of ``call``."""
    for ids in _batches(job_ids):
        output = call(["scancel", *ids.split(",")])
        if output.code and NO_JOB not in output.errors:
            do = "ask the owner of the jobs or the administrator of Slurm to cancel them"
            raise UsageError(f"scancel failed: {message(output)}", do=do)


def _accounts(which: Sequence[str], time_out_s: float) -> tuple[Output, dict[str, SlurmJob]]:
    command = ["sacct", "-X", "-D", "-n", "-P", f"--delimiter={FIELD}", *which, "-o", SACCT_FIELDS]
    output = call(command, _environ(), time_out_s)
    return output, parse_accounts(output.text)


def _queue(which: Sequence[str], time_out_s: float) -> dict[str, SlurmJob]:
    output = call(["squeue", "-h", "-r", "-t", "all", *which, "-O", SQUEUE_FIELDS], _environ(), time_out_s)
    if output.code and NO_JOB in output.errors:
        return {}
    _check(output, "Slurm does not report its jobs")
    return parse_queue(output.text)


def _check(output: Output, what: str) -> None:
    if output.code:
        raise InfrastructureError(f"{what}: {message(output)}", do=AGAIN)


def _batches(job_ids: Sequence[str]) -> Iterator[str]:
    for first in range(0, len(job_ids), IDS_PER_CALL):
        yield ",".join(job_ids[first : first + IDS_PER_CALL])


def _environ() -> dict[str, str]:
    return {**os.environ, **TIME_FORMAT}

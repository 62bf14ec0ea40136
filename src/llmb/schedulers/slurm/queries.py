# SPDX-License-Identifier: Apache-2.0
"""Queries Slurm for many jobs with few calls, to keep the load on the controller low."""

import os
from collections.abc import Iterator, Sequence
from datetime import datetime

from llmb.errors import InfrastructureError, UsageError
from llmb.schedulers.slurm.client import NO_JOB, TIME_OUT_S, call, message
from llmb.schedulers.slurm.job_state import (
    FIELD,
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    TIME_FORMAT,
    SlurmJob,
    parse_accounts,
    parse_queue,
)
from llmb.tools import Said

IDS_PER_CALL = 1000
NO_ACCOUNTS = "accounting storage is disabled"


def controller_states(job_ids: Sequence[str], time_out_s: float = TIME_OUT_S) -> dict[str, SlurmJob]:
    """States of the jobs that the controller remembers. Raises InfrastructureError where it does not answer."""
    found: dict[str, SlurmJob] = {}
    for ids in _batches(job_ids):
        # Of a single id that is unknown squeue makes an error; of several it leaves out the unknown ones.
        found.update(_queue(["-j", ids], time_out_s))
    return {job_id: found[job_id] for job_id in job_ids if job_id in found}


def own_jobs(time_out_s: float = TIME_OUT_S) -> list[SlurmJob]:
    """All of this user's jobs that the controller remembers."""
    return list(_queue(["--me"], time_out_s).values())


def accounted_states(job_ids: Sequence[str], time_out_s: float = TIME_OUT_S) -> dict[str, SlurmJob]:
    """States of the jobs that are in accounting, which lags behind; none on a cluster without accounting.

    Raises InfrastructureError if accounting does not answer.
    """
    found: dict[str, SlurmJob] = {}
    for ids in _batches(job_ids):
        done, accounts = _accounts(["-j", ids], time_out_s)
        if done.code and NO_ACCOUNTS in done.errors:
            return {}
        _check(done, "accounting does not answer")
        found.update(accounts)
    return {job_id: found[job_id] for job_id in job_ids if job_id in found}


def own_accounts(since_s: float, time_out_s: float = TIME_OUT_S) -> list[SlurmJob]:
    """All of this user's jobs since then that are in accounting; none if there is none, or it does not answer."""
    since = datetime.fromtimestamp(since_s - 60).strftime("%Y-%m-%dT%H:%M:%S")  # local time, as Slurm takes it
    done, accounts = _accounts(["-S", since], time_out_s)
    return list(accounts.values()) if done.code == 0 else []


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Raises UsageError if Slurm does not cancel one of them; jobs that have ended are no error."""
    for ids in _batches(job_ids):
        done = call(["scancel", *ids.split(",")])
        if done.code and NO_JOB not in done.errors:
            raise UsageError(f"Slurm did not cancel the job: {message(done)}")


def _accounts(which: Sequence[str], time_out_s: float) -> tuple[Said, dict[str, SlurmJob]]:
    """What sacct answers, and the jobs in it."""
    command = ["sacct", "-X", "-D", "-n", "-P", f"--delimiter={FIELD}", *which, "-o", SACCT_FIELDS]
    done = call(command, _environ(), time_out_s)
    return done, parse_accounts(done.text)


def _queue(which: Sequence[str], time_out_s: float) -> dict[str, SlurmJob]:
    done = call(["squeue", "-h", "-r", "-t", "all", *which, "-O", SQUEUE_FIELDS], _environ(), time_out_s)
    if done.code and NO_JOB in done.errors:
        return {}
    _check(done, "Slurm does not report its jobs")
    return parse_queue(done.text)


def _check(done: Said, what: str) -> None:
    if done.code:
        raise InfrastructureError(f"{what}: {message(done)}", do="try again, or see 'scontrol ping'")


def _batches(job_ids: Sequence[str]) -> Iterator[str]:
    for first in range(0, len(job_ids), IDS_PER_CALL):
        yield ",".join(job_ids[first : first + IDS_PER_CALL])


def _environ() -> dict[str, str]:
    return {**os.environ, **TIME_FORMAT}

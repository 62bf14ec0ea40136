# SPDX-License-Identifier: Apache-2.0
"""Resubmits jobs that the infrastructure made fail, without the nodes at fault.

The run keeps its folder: the new job resumes from the last checkpoint, if one exists.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

from llmb.errors import EnvironmentProblem, LlmbError, UsageError
from llmb.jobs.faults import faults_of, worth_a_retry
from llmb.jobs.job import Job
from llmb.jobs.order import Prepared
from llmb.jobs.store import KeyTaken, Store
from llmb.jobs.submit import hand_over, submission_lock
from llmb.jobspec.spec import read_spec
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record, write_record
from llmb.schedulers.lookup import find_scheduler
from llmb.trust import check_owner

LONGEST_AGO_S = 86400.0
"""A job that failed longer ago is not retried."""
KEPT = (
    *("scheduler", "cluster", "campaign", "label", "identity", "array_index", "base_dir"),
    *("proxy", "kind", "subject", "data", "origin"),
)
"""What a retry is and runs, as the job that it repeats."""
_NUMBER = re.compile(r"(.*)#(\d+)")


def retry_failed(store: Store, install: Path, environ: Mapping[str, str], now_s: float) -> Iterator[str]:
    """Resubmits jobs that may be retried; yields messages for the user.

    Of several clients only one does it. A rejected job is left unchanged, and retried at the next refresh.
    """
    for job in store.failed_with_retries(now_s - LONGEST_AGO_S):
        if job.retries - job.restarts < 1 or not worth_a_retry(faults_of(find_scheduler(job.scheduler)), job.fault):
            continue
        try:
            again, nodes = _submit_again(store, install, job, environ, now_s)
        except KeyTaken:
            continue
        except (LlmbError, OSError, ValueError) as error:
            what = error.what if isinstance(error, LlmbError) else error
            yield f"job {job.job_id} failed ({job.fault}) and could not be resubmitted: {what}"
            continue
        without = f", without {nodes}" if nodes else ""
        yield f"job {job.job_id} failed ({job.fault}); it was resubmitted as {again}{without}"


def repeated(job: Job, now_s: float) -> Job:
    """The next attempt at ``job``, which used one retry for each restart. Pure."""
    found = _NUMBER.fullmatch(job.key)
    fresh = {item.name: item.default for item in fields(Job) if item.default is not MISSING}
    same = {name: getattr(job, name) for name in KEPT}
    kept = {**same, "retries": job.retries - job.restarts - 1}
    key = f"{found[1]}#{int(found[2]) + 1}" if found else f"{job.key}#2"
    return replace(job, **{**fresh, **kept, "key": key, "retry_of": job.key, "submitted_s": now_s})


def excluded(*nodes: str | None) -> str | None:
    """Nodes to exclude: those that the job excludes itself, and all that were at fault. Pure."""
    return ",".join(dict.fromkeys(filter(None, nodes))) or None


def _submit_again(store: Store, install: Path, job: Job, environ: Mapping[str, str], now_s: float) -> tuple[str, str]:
    """Id of the new job, and the nodes that it excludes."""
    folder = RunFolder(Path(job.run_dir))
    check_owner(folder.job_spec, install)
    spec = read_spec(folder)
    nodes = excluded(spec.excluded_nodes, *(tried.bad_nodes for tried in _tries(store, job)))
    prepared = Prepared(
        spec.model_copy(update={"excluded_nodes": nodes}), job.base, {job.array_index: folder}, again=True
    )
    with submission_lock(install) as descriptor:
        new = repeated(job, now_s)
        store.add([new])
        record = read_record(folder)
        write_record(folder, record.model_copy(update={"status": "queued", "reason": None, "ended_at": None}))
        try:
            (queued,) = hand_over(store, prepared, {job.array_index: new}, environ, descriptor)
        except (UsageError, EnvironmentProblem):
            write_record(folder, record)
            raise
        return str(queued.job_id), nodes or ""


def _tries(store: Store, job: Job) -> Iterator[Job]:
    """The job, and those that it retries."""
    tried: Job | None = job
    while tried:
        yield tried
        tried = store.by_key(tried.retry_of) if tried.retry_of else None

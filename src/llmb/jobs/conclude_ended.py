# SPDX-License-Identifier: Apache-2.0
"""Concludes runs whose jobs ended without writing a result: killed, lost with their node, or never begun.

Clients do this before they show such a run, with the function that jobs call at their end.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, InfrastructureError
from llmb.base.trust import WORKLOADS
from llmb.jobs.finish import finish_job
from llmb.jobs.history import database_path, read_history
from llmb.jobs.job import LOST, Job
from llmb.jobs.refresh import NOT_CONCLUDED, refresh
from llmb.jobs.states import COMPLETED, FAILED, read_figures
from llmb.jobs.store import Filter, Store
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.folder import NotWritable, RunFolder
from llmb.runs.record import BegunJob, RunRecord, read_job, read_job_end, read_record, source_fields

KILLED = 137
Say = Callable[[str], None]


def conclude_ended(folders: Iterable[RunFolder], say: Say) -> bool:
    """Conclude the runs in ``folders`` that a history lists and that ended without a result; return whether any was
    concluded."""
    installs: dict[Path, list[str]] = {}
    for folder in folders:
        install = next((above.parent for above in folder.path.parents if above.name == WORKLOADS), None)
        if install and database_path(install).exists() and lacks_result(folder):
            installs.setdefault(install, []).append(str(folder.path))
    results = [_conclude_below(install, paths, say) for install, paths in installs.items()]
    return any(results)


def lacks_result(folder: RunFolder) -> bool:
    """Return whether a run has no result, or failed because its job received a signal, perhaps to cancel it."""
    try:
        record, end = read_record(folder), read_job_end(folder)
    except (OSError, ValueError):
        return False
    return record.status in ("queued", "running") or (
        record.status == "failed" and end is not None and end.signal != ""
    )


def _conclude_below(install: Path, paths: Iterable[str], say: Say) -> bool:
    with read_history(install, say) as store:
        jobs = [job for job in store.jobs(Filter(runs_only=True)) if job.run_dir in paths]
        if any(job.live for job in jobs):
            try:
                refresh(store, install)
            except (InfrastructureError, EnvironmentProblem) as error:
                say(f"states are from the last successful query, because {error.what}")
            jobs = [again for job in jobs if (again := store.by_key(job.key))]
        return [conclude_job(store, job, say) for job in jobs] != jobs


def conclude_job(store: Store, job: Job, say: Say) -> Job:
    """Conclude the job's run if it ended without a result; return the job, updated if it was concluded."""
    if job.live or job.kind != "run" or not lacks_result(job.folder):
        return job
    status = read_record(job.folder).status
    if status == "failed" and job.status != "cancelled":
        return job
    try:
        _conclude(job)
    except (OSError, ValueError) as error:
        say(f"run {job.id} has no result, and one cannot be written: {error}")
        return job
    say(f"run {job.id} ended without a result ({job.state}); concluding it now from its files")
    concluded = _with_result(job, read_record(job.folder))
    with suppress(NotWritable):  # as in the install root of another user
        store.apply([concluded], store.next_query())
    return concluded


def _conclude(job: Job) -> None:
    folder, record, end = job.folder, read_record(job.folder), read_job_end(job.folder)
    if end and record.job and end.job_id != record.job.job_id:
        end = None  # it belongs to a second job, which was rejected
    if end and job.state in (COMPLETED, FAILED, LOST):
        finish_job(folder, end.exit_code, end.signal)
        return
    cause: str | None = f"{find_scheduler(job.scheduler).title} ({job.state})"
    code = end.exit_code if end else job.exit_code or KILLED
    if folder.launch_output.exists():  # no script of llmb has recorded its start and end
        record = _begun_as(record, job)
        if job.state in (COMPLETED, FAILED):
            cause, code = None, job.exit_code or 0 if job.state == COMPLETED else code
    finish_run(folder, record, End(code, cause, cancelled=job.status == "cancelled"))


def _begun_as(record: RunRecord, job: Job) -> RunRecord:
    """Return ``record`` with the job as the scheduler reports it, because the job itself has not written anything."""
    handle = read_job(job.folder)
    if handle is None or job.started_s is None:
        return record
    begun = BegunJob(scheduler=handle.scheduler, job_id=handle.job_id, nodes=job.nodes or "", restarts=job.restarts)
    started_at = datetime.fromtimestamp(job.started_s, UTC).isoformat(timespec="seconds")
    return record.model_copy(update={"job": begun, "started_at": started_at, **source_fields()})


def _with_result(job: Job, record: RunRecord) -> Job:
    """Return ``job`` with its run's results, and the run's status and reason if they differ from the scheduler's."""
    reason = (job.reason or "").partition(NOT_CONCLUDED)[0].removesuffix("; ") or None
    if record.status not in (job.status, "queued", "running") or (job.state == FAILED and record.status == "failed"):
        assert record.result, "it was concluded"
        job, reason = replace(job, status=record.status), record.reason or record.result.note
    figures = read_figures(job.run_dir)
    nodes = ",".join(dict.fromkeys(filter(None, f"{job.bad_nodes or ''},{figures['bad_nodes'] or ''}".split(","))))
    return replace(job, **{**figures, "bad_nodes": nodes or None}, reason=reason)

# SPDX-License-Identifier: Apache-2.0
"""Jobs and nodes as tables and JSON documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.exchange.imported import ImportOrigin
from llmb.jobs.find import NodeRecord
from llmb.jobs.job import Job
from llmb.report.sparkline import sparkline
from llmb.report.table import Column, Table, cut, known, number, number_column, result_table, table_of
from llmb.runs.folder import RunFolder
from llmb.runs.record import Attempt, RunRecord
from llmb.verdict.sentence import headline

LONGEST_REASON = 100
"""In a row; 'show' prints all of it."""
MOST_DRAWN = 200
RUN_CELLS = 12
"""Width of the line of step times in a row."""
# States that add nothing to the status of the run.
_IMPLIED = {
    "queued": "PENDING",
    "running": "RUNNING",
    "success": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}


def jobs_document(jobs: Sequence[Job], total: int) -> dict[str, Any]:
    """The JSON of ``llmb jobs list``; its keys are a contract. ``total`` includes the jobs beyond the limit."""
    return {"jobs": [job.document() for job in jobs], "total": total}


def jobs_table(jobs: Sequence[Job], total: int) -> Table:
    shown = f"the last {len(jobs)} of {total:,}" if len(jobs) < total else f"{total:,}"
    # On a narrow terminal the other columns are shortened: a row has to be found by its id and state.
    columns: list[Column[Job]] = [
        Column("job", lambda job: job.job_id, wrap=False),
        Column("state", _state, min_width=9),
        Column("kind", lambda job: None if job.kind == "run" else job.kind, optional=True),
        Column("workload", lambda job: job.title.removeprefix(f"{job.kind} ")),
        Column("data", lambda job: job.data if job.kind == "run" else None, drop=1),
        number_column("scale", _scale, str),
        Column("submitted", lambda job: short_time(job.submitted_s), wrap=False, drop=3),
        Column("nodes", lambda job: job.nodes, drop=2),
        number_column("step s", lambda job: job.step_time_s, known, wrap=False),
        Column("verdict", lambda job: job.verdict, optional=True),
        Column("reason", lambda job: cut(job.reason or "", LONGEST_REASON) or None, optional=True),
    ]
    return table_of(f"Jobs: {shown}", jobs, columns)


def _state(job: Job) -> str:
    return job.status if _IMPLIED.get(job.status) == job.state else f"{job.status}: {job.state}"


def _scale(job: Job) -> str:
    return f"{job.scale} x {job.gpu_type}"


def runs_document(runs: Sequence[Job], total: int) -> dict[str, Any]:
    """The JSON of ``llmb runs``; its keys are a contract. ``total`` includes the runs beyond the limit."""
    return {"runs": [run.document() for run in runs], "total": total}


def runs_table(runs: Sequence[Job], total: int, step_times: Callable[[Job], Sequence[float]]) -> Table:
    """``step_times`` reads those of a run; of more than ``MOST_DRAWN`` runs it takes too long."""
    times = step_times if len(runs) <= MOST_DRAWN else lambda _: ()
    shown = f"the last {len(runs)} of {total:,}" if len(runs) < total else f"{total:,}"
    columns: list[Column[Job]] = [
        Column("id", lambda run: run.id, wrap=False),
        Column("label", lambda run: run.label, optional=True),
        Column("date", lambda run: short_time(run.started_s or run.submitted_s), wrap=False, drop=2),
        Column("recipe", lambda run: run.title, min_width=27),
        number_column("scale", _scale, str, wrap=False, drop=3),
        Column("status", lambda run: run.status, wrap=False),
        number_column("step s", lambda run: run.step_time_s, known, wrap=False),
        Column("steps", lambda run: sparkline(times(run), RUN_CELLS), wrap=False, optional=True, drop=1),
        Column("verdict", lambda run: run.verdict, wrap=False, optional=True),
    ]
    return table_of(f"Runs: {shown}", runs, columns)


def job_document(
    job: Job, record: RunRecord | None, last_lines: Sequence[str] = (), imported: ImportOrigin | None = None
) -> dict[str, Any]:
    """The JSON of ``llmb jobs show``; its keys are a contract. ``record`` is that of a run."""
    return {
        **job.document(),
        "files": {name: str(path) for name, path in _files(job).items()},
        "attempts": [attempt.model_dump(mode="json") for attempt in record.attempts] if record else [],
        "last_lines": list(last_lines),
        "verdict_sentence": _verdict(record),
        "imported": imported and imported.model_dump(mode="json"),
    }


def job_table(job: Job, record: RunRecord | None, imported: ImportOrigin | None = None) -> Table:
    table = result_table(f"Job {job.job_id or 'without an id'}: {job.name}", "", "")
    run = job.status + (f": {job.reason}" if job.reason else "")
    _add_known(table, {"verdict": _verdict(record), "state": job.state, "run": run})
    table.add_row("as of", local_time(job.checked_s) if job.checked_s else "its submission")
    table.add_row("recipe" if job.kind == "run" else job.kind, f"{job.title} on {job.scale} x {job.gpu_type}")
    if job.kind == "run":
        table.add_row("origin", job.origin or f"data: {job.data}")
    times = {"submitted": job.submitted_s, "started": job.started_s, "ended": job.ended_s}
    for name, time_s in times.items():
        if time_s is not None:
            table.add_row(name, local_time(time_s))
    values = {
        "cluster": job.cluster,
        "id of the run": job.id if job.kind == "run" else None,
        "label": job.label,
        "campaign": job.campaign,
        "nodes": job.nodes,
        "exit code": job.exit_code,
        "signal": job.signal,
        "restarts": job.restarts or None,
        "step time s": None if job.step_time_s is None else number(job.step_time_s),
        "cause": job.fault,
        "nodes at fault": job.bad_nodes,
        "retries left": job.retries or None,
        "repeats": job.retry_of,
        "imported": _origin_text(imported) if imported else None,
    }
    _add_known(table, values)
    if record and len(record.attempts) > 1:
        for attempt in record.attempts:
            table.add_row(f"attempt {attempt.number}", attempt_text(attempt))
    for name, path in _files(job).items():
        if name != "batch_output" or path.exists():  # a run on this machine has none
            table.add_row(name.replace("_", " "), str(path))
    return table


def _verdict(record: RunRecord | None) -> str | None:
    verdict = record.result.verdict if record and record.result else None
    return headline(verdict) if verdict else None


def _add_known(table: Table, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if value is not None:
            table.add_row(name, str(value))


def attempt_text(attempt: Attempt) -> str:
    end = "" if attempt.exit_code is None else f", ended with exit code {attempt.exit_code}"
    return f"from step {attempt.first_step} on {attempt.job.nodes} in job {attempt.job.job_id}{end}"


def _origin_text(origin: ImportOrigin) -> str:
    job = f", there job {origin.job_id} of {origin.scheduler}" if origin.job_id else ""
    return f"from {origin.archive}, made at {origin.created_at}{job}"


def nodes_document(records: Sequence[NodeRecord]) -> dict[str, Any]:
    """The JSON of ``llmb jobs nodes``; its keys are a contract."""
    return {"nodes": [asdict(record) for record in records]}


def nodes_table(records: Sequence[NodeRecord]) -> Table:
    columns: list[Column[NodeRecord]] = [
        Column("node", lambda record: record.node),
        number_column("runs", lambda record: record.runs, str),
        number_column("failures", lambda record: record.failures, str),
        number_column("at fault", lambda record: record.blamed, str),
        number_column("slowdown", lambda record: record.slowdown, lambda by: "n/a" if by is None else f"{by:.3f}"),
    ]
    return table_of(f"Nodes: {len(records)}", records, columns)


def local_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def short_time(time_s: float) -> str:
    """For a row of a table: without the year if it is the current one, without the time if it is not."""
    at = datetime.fromtimestamp(time_s)
    return at.strftime("%m-%d %H:%M" if at.year == datetime.now().year else "%Y-%m-%d")


def _files(job: Job) -> dict[str, Path]:
    folder = RunFolder(Path(job.run_dir))
    return {"run_dir": folder.path, "log": folder.log, "batch_output": folder.batch_output}

# SPDX-License-Identifier: Apache-2.0
"""Jobs and nodes as tables and JSON documents."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmb.jobs.job import Job
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.runs.folder import RunFolder

if TYPE_CHECKING:
    from llmb.jobs.details import JobDetails
    from llmb.jobs.nodes import NodeRecord
    from llmb.runs.record import Attempt

LONGEST_REASON = 100
_LEAST_WIDTHS = {"state": 9}
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
    judged = ("verdict",) if any(job.verdict for job in jobs) else ()
    columns = ("job", "state", "workload", "data", "scale", "submitted", "nodes", "step s", *judged, "reason")
    table = result_table(f"Jobs: {shown}", *columns, right=("scale", "step s"))
    for column in table.columns:
        # On a narrow terminal the other columns are shortened: a row has to be found by its id and state.
        column.wrap = column.header not in ("job", "step s")
        column.min_width = _LEAST_WIDTHS.get(column.header)
    for job in jobs:
        table.add_row(
            job.job_id or "",
            job.status if _IMPLIED.get(job.status) == job.state else f"{job.status}: {job.state}",
            job.title,
            "" if job.prepares else job.data,
            f"{job.scale} x {job.gpu_type}",
            short_time(job.submitted_s),
            job.nodes or "",
            "" if job.step_time_s is None else number(job.step_time_s),
            *((job.verdict or "",) if judged else ()),
            shortened(job.reason or ""),
        )
    return table


def runs_document(runs: Sequence[Job], total: int) -> dict[str, Any]:
    """The JSON of ``llmb runs``; its keys are a contract. ``total`` includes the runs beyond the limit."""
    return {"runs": [run.document() for run in runs], "total": total}


def runs_table(runs: Sequence[Job], total: int) -> Table:
    shown = f"the last {len(runs)} of {total:,}" if len(runs) < total else f"{total:,}"
    table = result_table(
        f"Runs: {shown}", "id", "label", "date", "recipe", "scale", "status", "step s", "verdict",
        right=("scale", "step s"),
    )  # fmt: skip
    for column in table.columns:
        column.wrap = column.header in ("label", "recipe", "scale")
    for run in runs:
        table.add_row(
            run.id,
            run.label or "",
            short_time(run.started_s or run.submitted_s),
            run.title,
            f"{run.scale} x {run.gpu_type}",
            run.status,
            "" if run.step_time_s is None else number(run.step_time_s),
            run.verdict or "",
        )
    return table


def job_document(job: Job, details: "JobDetails") -> dict[str, Any]:
    """The JSON of ``llmb jobs show``; its keys are a contract."""
    return {
        **job.document(),
        "files": {name: str(path) for name, path in _files(job).items()},
        "attempts": [attempt.model_dump(mode="json") for attempt in details.attempts],
        "last_lines": list(details.last_lines),
        "verdict_sentence": details.verdict,
    }


def job_table(job: Job, details: "JobDetails") -> Table:
    table = result_table(f"Job {job.job_id or 'without an id'}: {job.name}", "", "")
    run = job.status + (f": {job.reason}" if job.reason else "")
    _add_known(table, {"verdict": details.verdict, "state": job.state, "run": run})
    table.add_row("as of", local_time(job.checked_s) if job.checked_s else "its submission")
    table.add_row("recipe", f"{job.title} on {job.scale} x {job.gpu_type}")
    if not job.prepares:
        table.add_row("origin", job.origin or f"data: {job.data}")
    times = {"submitted": job.submitted_s, "started": job.started_s, "ended": job.ended_s}
    for name, time_s in times.items():
        if time_s is not None:
            table.add_row(name, local_time(time_s))
    values = {
        "cluster": job.cluster,
        "id of the run": None if job.prepares else job.id,
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
    }
    _add_known(table, values)
    if len(details.attempts) > 1:
        for attempt in details.attempts:
            table.add_row(f"attempt {attempt.number}", attempt_text(attempt))
    for name, path in _files(job).items():
        if name != "batch_output" or path.exists():  # a run on this machine has none
            table.add_row(name.replace("_", " "), str(path))
    return table


def _add_known(table: Table, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if value is not None:
            table.add_row(name, str(value))


def attempt_text(attempt: "Attempt") -> str:
    end = "" if attempt.exit_code is None else f", ended with exit code {attempt.exit_code}"
    return f"from step {attempt.first_step} on {attempt.job.nodes} in job {attempt.job.job_id}{end}"


def nodes_document(records: "Sequence[NodeRecord]") -> dict[str, Any]:
    """The JSON of ``llmb jobs nodes``; its keys are a contract."""
    return {"nodes": [asdict(record) for record in records]}


def nodes_table(records: "Sequence[NodeRecord]") -> Table:
    columns = ("node", "runs", "failures", "at fault", "slowdown")
    table = result_table(f"Nodes: {len(records)}", *columns, right=columns[1:])
    for record in records:
        slowdown = "n/a" if record.slowdown is None else f"{record.slowdown:.3f}"
        table.add_row(record.node, str(record.runs), str(record.failures), str(record.blamed), slowdown)
    return table


def local_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def short_time(time_s: float) -> str:
    """For a row of a table: without the year if it is the current one, without the time if it is not."""
    at = datetime.fromtimestamp(time_s)
    return at.strftime("%m-%d %H:%M" if at.year == datetime.now().year else "%Y-%m-%d")


def shortened(reason: str) -> str:
    """For a row of a table; 'show' prints the full reason."""
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."


def _files(job: Job) -> dict[str, Path]:
    folder = RunFolder(Path(job.run_dir))
    return {"run_dir": folder.path, "log": folder.log, "batch_output": folder.batch_output}

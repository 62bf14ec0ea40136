# SPDX-License-Identifier: Apache-2.0
"""Jobs, nodes, campaigns and runs, as tables, lines and JSON documents."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmb.base.shown_text import counted, printable
from llmb.catalogue.throughput import throughput
from llmb.jobs.campaigns.campaign import Campaign, PlannedJob, total, total_gpu_hours
from llmb.jobs.find_jobs import NodeRecord
from llmb.jobs.imported import ImportOrigin
from llmb.jobs.job import Job
from llmb.jobs.order import Order
from llmb.jobs.pace import PaceComparison, RunView
from llmb.reports.formats import cell, crop, duration, formatted, number, sparkline
from llmb.reports.recipe_report import identity_document
from llmb.reports.table import Column, Table, facts_table, fields_of, numbers, table_of, texts
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import Attempt, RunRecord
from llmb.runs.steps import StepNews
from llmb.verdict.judgement import headline

LONGEST_REASON = 100
"""The maximum number of characters of a reason in a row; ``llmb jobs show`` prints the whole reason."""
MOST_DRAWN = 200
RUN_CELLS = 12
"""Width of a row's sparkline of step times in characters."""
# States that add nothing to the status of the run.
_IMPLIED = {
    "queued": "PENDING",
    "running": "RUNNING",
    "success": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}


def jobs_document(jobs: Sequence[Job], total: int, key: str = "jobs") -> dict[str, Any]:
    """Return the JSON of a list of jobs or runs; its keys are a contract. ``total`` also counts unlisted jobs."""
    return {key: [job.document() for job in jobs], "total": total}


def jobs_table(jobs: Sequence[Job], total: int) -> Table:
    # On a narrow terminal, the id and the state stay readable, and other columns are shortened.
    columns: list[Column[Job]] = [
        *texts("job: job_id", wrap=False),
        Column("state", _state, min_width=9),
        Column("kind", lambda job: None if job.kind == "run" else job.kind, optional=True),
        Column("workload", lambda job: job.title.removeprefix(f"{job.kind} ")),
        Column("data", lambda job: job.data if job.kind == "run" else None, drop=1),
        Column("scale", _scale, right=True, drop=3),
        Column("submitted", lambda job: short_time(job.submitted_s), wrap=False, drop=4),
        *texts("nodes", drop=2),
        *numbers("step s: step_time_s", form=cell, wrap=False),
        *texts("verdict", optional=True),
        Column("reason", lambda job: crop(job.reason or "", LONGEST_REASON) or None, optional=True),
    ]
    return table_of(f"Jobs: {_limited(jobs, total)}", jobs, columns)


def _limited(jobs: Sequence[Job], total: int) -> str:
    return f"the last {len(jobs)} of {total:,}" if len(jobs) < total else f"{total:,}"


def _state(job: Job) -> str:
    return job.status if _IMPLIED.get(job.status) == job.state else f"{job.status}: {job.state}"


def _scale(job: Job) -> str:
    return f"{job.scale} x {job.gpu_type}"


def runs_table(runs: Sequence[Job], total: int, step_times: Callable[[Job], Sequence[float]]) -> Table:
    """Return a table of runs; ``step_times`` reads a run's step times, unless there are too many runs to show them."""
    times = step_times if len(runs) <= MOST_DRAWN else lambda _: ()
    columns: list[Column[Job]] = [
        *texts("id", wrap=False),
        *texts("label", optional=True),
        Column("date", lambda run: short_time(run.started_s or run.submitted_s), wrap=False, drop=3),
        *texts("recipe: title", min_width=27),
        Column("scale", _scale, right=True, wrap=False, drop=2),
        *texts("status", wrap=False),
        *numbers("step s: step_time_s", form=cell, wrap=False),
        Column("steps", lambda run: sparkline(times(run), RUN_CELLS), wrap=False, optional=True, drop=1),
        *texts("verdict", wrap=False, optional=True),
    ]
    return table_of(f"Runs: {_limited(runs, total)}", runs, columns)


def job_document(
    job: Job, record: RunRecord | None, last_lines: Sequence[str] = (), imported: ImportOrigin | None = None
) -> dict[str, Any]:
    """Return the JSON of ``llmb jobs show``; its keys are a contract. ``record`` is None if the job has no readable
    record."""
    return {
        **job.document(),
        "files": _files(job),
        "attempts": record.attempts if record else [],
        "last_lines": last_lines,
        "verdict_sentence": _verdict(record),
        "imported": imported,
    }


def job_table(job: Job, record: RunRecord | None, imported: ImportOrigin | None = None) -> Table:
    attempts = record.attempts if record and len(record.attempts) > 1 else ()
    times = fields_of(job, "submitted: submitted_s", "started: started_s", "ended: ended_s")
    is_run = job.kind == "run"
    imported_job = f", there job {imported.job_id} of {imported.scheduler}" if imported and imported.job_id else ""
    facts = [
        ("verdict", _verdict(record)),
        ("state", job.state),
        ("run", job.status + (f": {job.reason.removeprefix(f'{job.status}, ')}" if job.reason else "")),
        ("as of", local_time(job.checked_s) if job.checked_s else "its submission"),
        ("recipe" if is_run else job.kind, f"{job.title} on {job.scale} x {job.gpu_type}"),
        ("origin", (job.origin or f"data: {job.data}") if is_run else None),
        *((name, None if time_s is None else local_time(time_s)) for name, time_s in times.items()),
        ("cluster", job.cluster),
        ("id of the run", job.id if is_run else None),
        *fields_of(job, "label", "campaign", "nodes", "exit code: exit_code", "signal").items(),
        ("restarts", job.restarts or None),
        ("step time s", None if job.step_time_s is None else number(job.step_time_s)),
        *fields_of(job, "cause: fault", "nodes at fault: bad_nodes").items(),
        ("retries left", job.retries or None),
        ("repeats", job.retry_of),
        ("imported", imported and f"from {imported.archive}, made at {imported.created_at}{imported_job}"),
        *((f"attempt {attempt.number}", _attempt_text(attempt)) for attempt in attempts),
        # A run on this machine has no output of a batch script.
        *((n.replace("_", " "), path) for n, path in _files(job).items() if n != "batch_output" or path.exists()),
    ]
    return facts_table(f"Job {job.job_id or 'without an id'}: {job.name}", facts)


def _verdict(record: RunRecord | None) -> str | None:
    verdict = record.result.verdict if record and record.result else None
    return headline(verdict) if verdict else None


def _attempt_text(attempt: Attempt) -> str:
    end = "" if attempt.exit_code is None else f", ended with exit code {attempt.exit_code}"
    return f"from step {attempt.first_step} on {attempt.job.nodes} in job {attempt.job.job_id}{end}"


def nodes_table(records: Sequence[NodeRecord]) -> Table:
    counts = numbers("runs", "failures", "at fault: blamed", form=str)
    columns = [*texts("node"), *counts, *numbers("slowdown", form=formatted("{:.3f}", "n/a"))]
    return table_of(f"Nodes: {len(records)}", records, columns)


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def local_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def short_time(time_s: float) -> str:
    """Format a time for a table: without the year if it is the current year, otherwise without the time of day."""
    at = datetime.fromtimestamp(time_s)
    return at.strftime("%m-%d %H:%M" if at.year == datetime.now().year else "%Y-%m-%d")


def _files(job: Job) -> dict[str, Path]:
    folder = RunFolder(Path(job.run_dir))
    return {"run_dir": folder.path, "log": folder.log, "batch_output": folder.batch_output}


def script_document(order: Order, script: str) -> dict[str, Any]:
    """Return the JSON of ``llmb submit --dry-run``; its keys are a contract."""
    return {
        **identity_document(order.plan.recipe),
        "origin": order.plan.origin.document(),
        "not_prepared": order.missing and order.missing.what,
        "script": script,
    }


def queued_document(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the JSON of queued jobs of any kind."""
    return {
        "jobs": [
            {
                **fields_of(job, "job_id", "cluster", "run_dir"),
                "script": RunFolder(Path(job.run_dir)).batch_script,
                "submitted_at": _utc(job.submitted_s),
            }
            for job in jobs
        ]
    }


def submit_text(jobs: Sequence[Job]) -> str:
    return "".join(f"{job.job_id}  {job.run_dir}\n" for job in jobs)


def flags_text(flags: Mapping[str, str | None]) -> str:
    """Format a job's requested resources, time limit, account, partition, QOS and reservation in one line."""
    shown = ("nodes", "gpus-per-node", "gres", "time", "account", "partition", "qos", "reservation")
    return ", ".join(f"{name} {flags[name]}" for name in shown if flags.get(name))


_SHOWN = (
    *(f"request.{name}" for name in ("workload", "size", "dtype", "gpu_type", "scale", "proxy")),
    "choices.profiling",
    "options.flags.time",
)
"""Prefixes of the settings that other columns show."""


def campaign_table(jobs: Sequence[PlannedJob]) -> Table:
    """Return a table with one row per job in the order of submission, and the total."""
    # Settings that all jobs have in common need no column.
    rows = zip(range(1, len(jobs) + 1), jobs, different_settings(jobs), strict=True)
    columns: list[Column[tuple[int, PlannedJob, str]]] = [
        *texts(": 0", right=True),
        *texts("workload: 1.recipe.workload"),
        Column("size", lambda row: f"{row[1].recipe.size} {row[1].recipe.proxy_text}".strip()),
        *texts("dtype: 1.recipe.dtype"),
        *texts("data: 1.order.plan.origin.data.short", drop=1),
        *texts("GPUs: 1.recipe.scale", right=True),
        *texts("type: 1.recipe.gpu_type", drop=3),
        *texts("nodes: 1.spec.placement.nodes", right=True, drop=2),
        *numbers("limit: 1.spec.time_limit_min", form=formatted("{:g} min", "none"), wrap=False),
        *numbers("GPU-hours: 1.gpu_hours", "expected: 1.expected_gpu_hours"),
        Column("run", lambda row: f"{row[1].job.repeat}{', profiled' if row[1].job.profiled else ''}"),
        *texts("with: 2", optional=True),
        *(texts("asked by: 1.job.where") if len({item.job.where for item in jobs}) > 1 else ()),
    ]
    table = table_of("Campaign", rows, columns)
    expected = total(item.expected_gpu_hours for item in jobs)
    table.add_row("", counted(len(jobs), "job"), *[""] * 7, number(total_gpu_hours(jobs)), number(expected))
    return table


def different_settings(jobs: Sequence[PlannedJob]) -> list[str]:
    """Return each job's settings that differ between jobs and have no column, such as ``seed=2``."""
    found = [dict(_settings(item.job.wanted.model_dump(mode="json"))) for item in jobs]
    names = [name for name in dict.fromkeys(name for own in found for name in own) if not name.startswith(_SHOWN)]
    kept = [name for name in names if len({str(own.get(name)) for own in found}) > 1]
    return [
        ", ".join(f"{name.rpartition('.')[2]}={own[name]}" for name in kept if own.get(name) is not None)
        for own in found
    ]


def _settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def campaign_document(campaign: Campaign, jobs: Sequence[PlannedJob]) -> dict[str, Any]:
    """Return the JSON of a campaign; its keys are a contract."""
    by_key = {job.key: job for job in campaign.jobs}
    return {
        **fields_of(campaign, "campaign", "source"),
        "gpu_hours": total_gpu_hours(jobs),
        "expected_gpu_hours": total(item.expected_gpu_hours for item in jobs),
        "jobs": [
            {
                "key": item.job.key,
                **fields_of(item.recipe, "workload", "size", "dtype", "gpu_type", "scale"),
                "origin": item.order.plan.origin.document(),
                "proxy": bool(item.recipe.proxy_text),
                **fields_of(item, "gpu_hours", "expected_gpu_hours", "spec.placement.nodes", "spec.time_limit_min"),
                **fields_of(by_key[item.job.key], "repeat", "profiled", "state", "job_id", "reason"),
                **fields_of(by_key[item.job.key], "asked_by: where", "run_dir: folder"),
            }
            for item in jobs
        ],
    }


MOST_STEPS = 10


def watch_title(plan: Plan, job: Job) -> str:
    return f"{plan.recipe.title()}, job {job.job_id}" if job.job_id else plan.recipe.title()


def watch_line(seen: RunView) -> str:
    """Describe the state of a run, or its last step, pace and time left."""
    attempt = f", attempt {seen.attempt}" if seen.attempt > 1 else ""
    nodes = f" on {seen.nodes}" if seen.nodes and seen.state != "queued" else ""
    state = printable(f"{seen.state}{nodes}{attempt}" + (f": {seen.reason}" if seen.reason else ""))
    if not seen.steps or seen.state == "queued":
        return state
    last = seen.steps[-1]
    parts = [f"step {seen.done}/{seen.total}", f"{number(last.step_time_s)} s"]
    parts += [] if last.loss is None else [f"loss {number(last.loss)}"]
    parts += [f"median {number(seen.pace.step_time_s.median)} s"] if seen.pace else []
    parts += [f"{duration(seen.remaining_s)} left"] if seen.remaining_s else []
    return "  ".join([*parts, *([state] if seen.state == "ended" else [])])


def pace_warning(comparison: PaceComparison) -> str:
    """Describe how the pace differs from the expected pace."""
    delta, expected = comparison.delta_pct or 0.0, comparison.expected
    how = "longer" if delta > 0 else "less"
    said = f"{number(expected.step_time_s)} s, {expected.source}"
    return printable(f"WARNING: steps take {abs(delta):.1f} % {how} than expected ({said})")


def watch_document(job: Job, plan: Plan, seen: RunView, result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the JSON of ``llmb watch``; its keys are a contract. ``result`` is None unless the run has one."""
    speed = left = None
    if seen.remaining_s is not None:
        ends_at = _utc(seen.at_s + seen.remaining_s)
        left = {"steps_left": seen.total - seen.done, "remaining_s": seen.remaining_s, "ends_at": ends_at}
    if seen.pace and plan.recipe.pretended_rank is None and seen.pace.step_time_s.mean > 0:
        speed = throughput(plan.recipe, seen.pace.step_time_s.mean, lora=plan.lora)
    speeds = ("tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
    return {
        "title": watch_title(plan, job),
        **fields_of(job, "path: run_dir", "job_id"),
        **fields_of(seen, "state", "reason", "nodes", "attempt", "steps_done: done", "steps_total: total"),
        "since_last_step_s": seen.since_last_s,
        "last_steps": [_step_document(step) for step in seen.steps[-MOST_STEPS:]],
        "pace": seen.pace,
        **fields_of(speed, *speeds),
        "forecast": left,
        **fields_of(seen, "time_limit_left_s: limit_left_s", "expectation: comparison"),
        "result": result,
    }


def _step_document(step: StepNews) -> dict[str, Any]:
    """Return the JSON of a step. Non-finite values are null, because JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in step._asdict().items()
    }

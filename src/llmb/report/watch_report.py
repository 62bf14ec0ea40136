# SPDX-License-Identifier: Apache-2.0
"""A run that has not ended, as lines and as a JSON document."""

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from llmb.analysis.watched import PaceComparison, RunView
from llmb.jobs.job import Job
from llmb.metrics.throughput import throughput
from llmb.report.table import duration, number
from llmb.runs.plan import Plan
from llmb.runs.steps import StepNews
from llmb.shown_text import printable

MOST_STEPS = 10


def watch_title(plan: Plan, job: Job) -> str:
    return f"{plan.recipe.title()}, job {job.job_id}" if job.job_id else plan.recipe.title()


def watch_line(seen: RunView) -> str:
    """Its state, or its last step, pace and time left."""
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
    """Where the pace has left what was expected."""
    delta, expected = comparison.delta_pct or 0.0, comparison.expected
    how = "longer" if delta > 0 else "less"
    said = f"{number(expected.step_time_s)} s, {expected.source}"
    return printable(f"WARNING: steps take {abs(delta):.1f} % {how} than expected ({said})")


def watch_document(job: Job, plan: Plan, seen: RunView, result: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON of ``llmb watch``; its keys are a contract. ``result`` is that of a run that has ended."""
    speed = None
    if seen.pace and plan.recipe.pretended_rank is None and seen.pace.step_time_s.mean > 0:
        speed = throughput(plan.recipe, seen.pace.step_time_s.mean, lora=plan.lora)
    return {
        "title": watch_title(plan, job),
        "path": job.run_dir,
        "job_id": job.job_id,
        "state": seen.state,
        "reason": seen.reason,
        "nodes": seen.nodes,
        "attempt": seen.attempt,
        "steps_done": seen.done,
        "steps_total": seen.total,
        "since_last_step_s": seen.since_last_s,
        "last_steps": [_step_document(step) for step in seen.steps[-MOST_STEPS:]],
        "pace": seen.pace and asdict(seen.pace),
        "tokens_per_s": speed and speed.tokens_per_s,
        "tokens_per_s_per_gpu": speed and speed.tokens_per_s_per_gpu,
        "tflops_per_gpu": speed and speed.tflops_per_gpu,
        "mfu_pct": speed and speed.mfu_pct,
        "forecast": _time_left(seen),
        "time_limit_left_s": seen.limit_left_s,
        "expectation": seen.comparison and asdict(seen.comparison),
        "result": result,
    }


def _step_document(step: StepNews) -> dict[str, Any]:
    """JSON has no NaN: a value that is not finite is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in step._asdict().items()
    }


def _time_left(seen: RunView) -> dict[str, Any] | None:
    if seen.remaining_s is None:
        return None
    ends = datetime.fromtimestamp(seen.at_s + seen.remaining_s, UTC).isoformat(timespec="seconds")
    return {"steps_left": seen.total - seen.done, "remaining_s": seen.remaining_s, "ends_at": ends}

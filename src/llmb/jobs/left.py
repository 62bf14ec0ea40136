# SPDX-License-Identifier: Apache-2.0
"""Reads what a job left in its run folder, as far as it can be read."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.jobs.states import Left
from llmb.programs.lookup import find_program
from llmb.programs.port import Progress
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_record


def read_left(run_dir: str) -> Left:
    """What is missing, damaged or not to be read is as if it were not there: a job may die anywhere."""
    folder = RunFolder(Path(run_dir))
    record, end = _record(folder), _json(folder.job_end)
    progress = _read_progress(folder, record) if record else Progress(0, done=False)
    return Left(
        begun=(record is not None and record.started_at is not None) or bool(end) or folder.batch_output.exists(),
        job_id=_text(end, "job_id"),
        restarts=_number(end, "restarts") or 0,
        exit_code=_number(end, "exit_code"),
        signal=_text(end, "signal"),
        ended_s=_seconds(_text(end, "ended_at")),
        run_status=record.status if record else None,
        run_reason=record.reason if record else None,
        run_of=(record.job.job_id, record.job.restarts) if record and record.job else None,
        steps=progress.steps,
        planned=record.plan.steps if record else None,
        done=progress.done,
    )


def _read_progress(folder: RunFolder, record: RunRecord) -> Progress:
    try:
        return find_program(record.program).progress(folder, record.plan)
    except (OSError, ValueError):
        return Progress(0, done=False)


def read_step_time(run_dir: str) -> float | None:
    """Mean step time in seconds that the run measured; null where it measured none."""
    record = _record(RunFolder(Path(run_dir)))
    times = record.result.get("step_time_s") if record and record.result else None
    return times["mean"] if isinstance(times, dict) else None


def _record(folder: RunFolder) -> RunRecord | None:
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(values: dict[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) and value else None


def _number(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None


def _seconds(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None

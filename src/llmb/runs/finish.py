# SPDX-License-Identifier: Apache-2.0
"""Ends a run's record: reads what the workers left, concludes, writes ``run.json``."""

import json
from pathlib import Path

from llmb.runs.checkpoint_report import report_checkpoints
from llmb.runs.failure import LOCALHOST
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, now, write_record
from llmb.runs.result import Result, conclude
from llmb.runs.steps import read_steps

TAIL_BYTES = 64 * 1024


def finish(folder: RunFolder, record: RunRecord, exit_code: int, interrupted: str | None = None) -> Result:
    """The result of a run that ended, which the record then holds too.

    Raises OSError where the record cannot be written.
    """
    steps = read_steps(folder.steps)
    checkpoint = report_checkpoints(folder, record.plan, steps)
    environment = json.loads(folder.environment.read_text()) if folder.environment.exists() else None
    nodes = environment["nodes"] if environment else [LOCALHOST]
    result = conclude(record.plan, steps, exit_code, tail(folder.log), interrupted, checkpoint, nodes[0])
    ended = record.model_copy(
        update={
            "status": result.status,
            "reason": result.reason,
            "exit_code": exit_code,
            "ended_at": now(),
            "environment": environment,
            "result": result.document(),
        }
    )
    write_record(folder, ended)
    folder.environment.unlink(missing_ok=True)
    folder.stall.unlink(missing_ok=True)
    return result


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The last ``size`` bytes of a text file; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - size))
        return stream.read().decode(errors="replace")

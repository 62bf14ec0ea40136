# SPDX-License-Identifier: Apache-2.0
"""Ends a run's record: reads what the workers left, concludes, writes ``run.json``."""

from dataclasses import replace
from pathlib import Path

from llmb.runs.attempts import cut, is_done
from llmb.runs.checkpoint_report import report_checkpoints
from llmb.runs.environment import read_environment
from llmb.runs.failure import LOCALHOST, latest_attempt
from llmb.runs.folder import RunFolder
from llmb.runs.profile_report import keep_breakdown, report_profile
from llmb.runs.record import RunRecord, now, write_record
from llmb.runs.result import Result, conclude
from llmb.runs.steps import read_steps

TAIL_BYTES = 64 * 1024


def finish(
    folder: RunFolder,
    record: RunRecord,
    exit_code: int,
    interrupted: str | None = None,
    export_failure: str | None = None,
) -> Result:
    """The result of a run that ended, which the record then holds too.

    ``export_failure`` is why its profile cannot be read.

    Raises OSError where the record cannot be written.
    """
    environment = read_environment(folder.environment) or record.environment
    known = record.model_copy(update={"environment": environment})
    result = result_of(folder, known, exit_code, interrupted, export_failure)
    keep_breakdown(folder, result.profile)
    ended = known.model_copy(
        update={
            "status": result.status,
            "reason": result.reason,
            "exit_code": exit_code,
            "ended_at": now(),
            "result": result,
        }
    )
    write_record(folder, ended)
    folder.environment.unlink(missing_ok=True)
    folder.stall.unlink(missing_ok=True)
    return result


def finish_from_outside(
    folder: RunFolder, record: RunRecord, exit_code: int, cause: str, export_failure: str | None = None
) -> Result:
    """The same for a run that ``cause`` ended: it is a success where everything was done by then."""
    if is_done(folder, record.plan):
        return finish(folder, record, 0, None, export_failure)
    return finish(folder, record, exit_code, cause, export_failure)


def result_of(
    folder: RunFolder,
    record: RunRecord,
    exit_code: int,
    interrupted: str | None = None,
    export_failure: str | None = None,
) -> Result:
    """What the files of a run that ended say; nothing is written."""
    steps = read_steps(folder.steps)
    checkpoint = report_checkpoints(folder, record.plan, steps)
    host = record.environment.nodes[0] if record.environment else LOCALHOST
    profile = report_profile(folder, record.plan, export_failure)
    result = conclude(
        record.plan, steps, exit_code, tail(folder.log), interrupted, checkpoint, profile, host, cut(record)
    )
    environment = record.environment
    if environment and environment.attention:
        result = result.model_copy(update={"attention_backend": environment.attention.backend})
    if environment and result.fp8 and environment.fp8_product:
        fp8 = replace(result.fp8, product=environment.fp8_product)
        result = result.model_copy(update={"fp8": fp8})
    return result


def finished_result(folder: RunFolder, record: RunRecord) -> Result:
    """The result of a run whose record is finished already."""
    assert record.exit_code is not None, "the run has not ended"
    result = result_of(folder, record, record.exit_code)
    assert record.status not in ("queued", "running")
    return result.model_copy(update={"status": record.status, "reason": record.reason})


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The last ``size`` bytes of a log, of the latest attempt alone; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - size))
        return latest_attempt(stream.read().decode(errors="replace"))

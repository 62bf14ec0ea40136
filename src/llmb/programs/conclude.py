# SPDX-License-Identifier: Apache-2.0
"""Ends the record of a run, whatever ended the run, and whoever notices: reads, concludes, writes ``run.json``."""

from typing import Any

from llmb.programs.lookup import find_program
from llmb.programs.port import End
from llmb.runs.environment import read_environment
from llmb.runs.folder import RunFolder
from llmb.runs.profile_report import keep_breakdown
from llmb.runs.published_verdict import with_verdict
from llmb.runs.record import RunRecord, VboostOutcome, now, write_record
from llmb.runs.record_file import BrokenRecord, read_record_file
from llmb.runs.result import Result


def conclude_run(folder: RunFolder, record: RunRecord, end: End) -> Result:
    """The result of a run that ended, which the record then holds too.

    What ends a run that is done takes nothing away from it, and is noted. Raises OSError where the record cannot be
    written.
    """
    program = find_program(record.program)
    environment = read_environment(folder.environment) or record.environment
    vboost = read_record_file(folder.vboost, VboostOutcome) if folder.vboost.exists() else record.vboost
    known = record.model_copy(update={"environment": environment, "vboost": vboost})
    after = f"ended by {end.cause}" if end.cause else f"exit code {end.exit_code}" if end.exit_code else None
    done = after is not None and program.progress(folder, record.plan).done
    if done and end.cause:
        end = End(0)
    result = with_verdict(program.result(folder, known, End(0) if done else end), known)
    if after and result.status == "success":
        result = result.model_copy(update={"note": f"{after}, after its last step"})
    keep_breakdown(folder, result.profile)
    ended = known.model_copy(
        update={
            "status": result.status,
            "reason": result.reason,
            "exit_code": end.exit_code,
            "ended_at": now(),
            "result": result,
        }
    )
    write_record(folder, ended)
    folder.environment.unlink(missing_ok=True)
    folder.vboost.unlink(missing_ok=True)
    folder.stall.unlink(missing_ok=True)
    return result


def finished_result(folder: RunFolder, record: RunRecord) -> Result:
    """The result of a run whose record is finished already; nothing is written. Raises BrokenRecord."""
    assert record.status not in ("queued", "running")
    assert record.exit_code is not None
    code = 0 if record.status == "success" else record.exit_code  # what came after the last step is a note
    do = f"the log has its steps: 'llmb parse {folder.log}'"
    try:
        result = find_program(record.program).result(folder, record, End(code))
    except BrokenRecord as error:
        raise BrokenRecord(error.what, where=error.where, do=do) from error
    except OSError as error:
        what = f"the run cannot be read: {error.strerror}"
        raise BrokenRecord(what, where=error.filename, do=do) from error
    return with_verdict(result.model_copy(update=_recorded(record, result)), record)


def _recorded(record: RunRecord, result: Result) -> dict[str, Any]:
    """What the record knows better than the files of the run, unless these say that it is not true."""
    note = record.result.note if record.result else None
    if record.status == "success" and result.status != "success":
        reason = result.reason if result.status == "invalid" else f"the record says success, and: {result.reason}"
        return {"status": "invalid", "reason": reason, "note": note}
    return {"status": record.status, "reason": record.reason, "note": note}

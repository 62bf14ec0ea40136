# SPDX-License-Identifier: Apache-2.0
"""Ends the record of a run, whatever ended the run, and whoever notices: reads, concludes, writes ``run.json``."""

from llmb.errors import InfrastructureError
from llmb.programs.lookup import find_program
from llmb.programs.port import End
from llmb.runs.environment import read_environment
from llmb.runs.folder import RunFolder
from llmb.runs.profile_report import keep_breakdown
from llmb.runs.published_verdict import with_verdict
from llmb.runs.record import RunRecord, now, write_record
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import Result


def conclude_run(folder: RunFolder, record: RunRecord, end: End) -> Result:
    """The result of a run that ended, which the record then holds too.

    What ends a run from outside takes nothing away from one that is done. Raises OSError where the record cannot be
    written.
    """
    program = find_program(record.program)
    environment = read_environment(folder.environment) or record.environment
    known = record.model_copy(update={"environment": environment})
    if end.cause and program.progress(folder, record.plan).done:
        end = End(0)
    result = with_verdict(program.result(folder, known, end), known)
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
    folder.stall.unlink(missing_ok=True)
    return result


def finished_result(folder: RunFolder, record: RunRecord) -> Result:
    """The result of a run whose record is finished already; nothing is written. Raises BrokenRecord."""
    assert record.status not in ("queued", "running")
    # Of a job that never reached its scheduler, earlier versions recorded no exit code.
    code = InfrastructureError.exit_code if record.exit_code is None else record.exit_code
    do = f"the log has its steps: 'llmb parse {folder.log}'"
    try:
        result = find_program(record.program).result(folder, record, End(code))
    except BrokenRecord as error:
        raise BrokenRecord(error.what, where=error.where, do=do) from error
    except OSError as error:
        what = f"the run cannot be read: {error.strerror}"
        raise BrokenRecord(what, where=error.filename, do=do) from error
    return with_verdict(result.model_copy(update={"status": record.status, "reason": record.reason}), record)

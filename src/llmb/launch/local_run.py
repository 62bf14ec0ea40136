# SPDX-License-Identifier: Apache-2.0
"""One whole run on this machine: record, workers, result."""

from collections.abc import Callable, Mapping

from llmb.errors import InvalidRun, RunFailed, UserInterrupt
from llmb.launch.command import local_command
from llmb.launch.local import Interrupted, run_workers
from llmb.launch.nsys import export_report
from llmb.runs.failure import last_lines
from llmb.runs.finish import finish, tail
from llmb.runs.folder import RunFolder, cannot_write
from llmb.runs.plan import EnginePlan
from llmb.runs.record import new_record, write_record
from llmb.runs.result import Result
from llmb.runs.stall import time_to_notice
from llmb.runs.steps import Step

INTERRUPTED = 130
LAST_LINES = 12


def run_here(
    plan: EnginePlan, folder: RunFolder, variables: Mapping[str, str], on_step: Callable[[Step], None]
) -> Result:
    """Runs ``plan`` to its end, whatever that is, and writes its record.

    Raises UserInterrupt once an interrupted run is ended and recorded, EnvironmentProblem where nothing can be written.
    """
    patience_s = time_to_notice(plan.stall_limit_s)
    record = new_record(plan, local_command(plan, folder), variables)
    try:
        write_record(folder, record)
        try:
            exit_code, interrupted = run_workers(record.command, variables, folder, on_step, patience_s), None
        except Interrupted as signal:
            exit_code, interrupted = INTERRUPTED, str(signal)
        result = finish(folder, record, exit_code, interrupted, export_report(plan, folder))
    except OSError as error:
        raise cannot_write(folder.path, error) from error
    if interrupted:
        raise UserInterrupt(f"the run was {result.reason}", where=str(folder.log))
    return result


def raise_unless_successful(folder: RunFolder, result: Result) -> None:
    """Raises InvalidRun or RunFailed, with the end of the log."""
    if result.status == "invalid":
        raise InvalidRun(f"the run is invalid: {result.reason}", where=str(folder.log))
    if result.status == "failed":
        lines = "\n".join(f"  | {line}" for line in last_lines(tail(folder.log), LAST_LINES))
        raise RunFailed(f"the run failed: {result.reason}\n{lines}", where=str(folder.log))

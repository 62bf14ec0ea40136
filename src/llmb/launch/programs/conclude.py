# SPDX-License-Identifier: Apache-2.0
"""Ends the record of a run, for any cause and by any process; and reads the results of ended runs."""

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.launch.documents.documented_paths import add_documented_trace, link_as_documented
from llmb.launch.jobspec.spec import JobSpec
from llmb.launch.programs.port import End, find_program
from llmb.readers.samples.node_settings import NodesSettings
from llmb.readers.samples.samples import discard_settings, settings_of_nodes
from llmb.runs.conclusion import why_contradicting
from llmb.runs.environment import Environment
from llmb.runs.folder import UNREADABLE, BrokenRecord, RunFolder, read_or_missing, read_stored, why_unreadable
from llmb.runs.plan import Plan
from llmb.runs.record import ENGINE, RunRecord, VboostOutcome, now, read_record, unreadable_record, write_record
from llmb.runs.result import Result, without_figures
from llmb.runs.steps import Step, read_steps
from llmb.runs.trace_reports import report_network, write_breakdown
from llmb.verdict.published_verdict import with_verdict

NEVER_READABLE = (errno.EINVAL, errno.EFBIG)
"""Error codes of a file that is not a regular one, or too large."""


def finish_run(folder: RunFolder, record: RunRecord, end: End, spec: JobSpec | None = None) -> Result:
    """Finish the record of a run: conclude it, add NCCL's report of its network, judge it, and link its files.

    The record has the result before it is judged. ``spec`` is of a job whose document may name its files
    differently; if None, no links are made. Raises OSError, as ``conclude_run`` does.
    """
    concluded = conclude_run(folder, record, end)
    write_record(folder, concluded)
    judged = judge_run(add_network(folder, concluded))
    write_record(folder, judged)
    assert judged.result, "it was concluded"
    remove_merged_files(folder, judged.result)
    if spec:
        link_as_documented(folder, spec, judged)
        add_documented_trace(folder, judged.plan)
    return judged.result


def conclude_run(folder: RunFolder, record: RunRecord, end: End) -> RunRecord:
    """Return the record of a run that ended, with its result, which is not judged yet. Nothing is written.

    What ends a run that is done takes nothing away from it, and is noted. What cannot be read of its files is missing
    with the reason, and never keeps it from its end. Raises OSError where the steps cannot be read now, but may be
    later.
    """
    base = record.model_copy(update=_left_beside(folder))
    after = f"ended by {end.cause}" if end.cause else f"exit code {end.exit_code}" if end.exit_code else None
    result, is_done = _read_result(folder, base, end, after)
    if is_done and end.cause:
        end = End(0)
    settings = _settings(folder, base, result)
    if after and result.status == "success":
        result = result.model_copy(update={"note": f"{after}, after its last step"})
    if end.cancelled and result.status == "failed":
        result = result.model_copy(update={"status": "cancelled"})
    ended = {"status": result.status, "reason": result.reason, "exit_code": end.exit_code, "ended_at": now()}
    return base.model_copy(update={**ended, "settings": settings, "result": result})


def add_network(folder: RunFolder, record: RunRecord) -> RunRecord:
    """Add the network that the run used, from NCCL's log."""
    assert record.result, "it was concluded"
    network = report_network(folder, record.plan, record.environment or None)
    return record.model_copy(update={"result": record.result.model_copy(update={"network": network})})


def judge_run(record: RunRecord) -> RunRecord:
    """Add the verdict of the result against the published figure."""
    assert record.result, "it was concluded"
    return record.model_copy(update={"result": with_verdict(record.result, record)})


def remove_merged_files(folder: RunFolder, result: Result) -> None:
    """Remove files that the record replaces; the breakdown of a step also has a file of its own."""
    with suppress(OSError):
        write_breakdown(folder, result.profile)
    for file in (folder.environment, folder.vboost, folder.stall):
        with suppress(OSError):
            file.unlink()
    discard_settings(folder.resources)


def _left_beside(folder: RunFolder) -> dict[str, Any]:
    """Read the files that workers and the batch script left for the record."""
    fields: dict[str, Any] = {}
    if folder.environment.exists():
        wrote = "what the workers wrote"
        fields["environment"] = read_or_missing(wrote, lambda: read_stored(folder.environment, Environment))
    if folder.vboost.exists():
        wrote = "what the batch script wrote"
        fields["vboost"] = read_or_missing(wrote, lambda: read_stored(folder.vboost, VboostOutcome))
    return fields


def _read_result(folder: RunFolder, record: RunRecord, end: End, after: str | None) -> tuple[Result, bool]:
    """Return the result from the program's files, and whether the run was complete when ``after`` ended it."""
    program = find_program(record.program)
    try:
        is_done = after is not None and program.progress(folder, record.plan).complete
        return program.result(folder, record, End(0) if is_done else end), is_done
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno not in NEVER_READABLE:
            raise
        reason = "; ".join(filter(None, (f"its files cannot be read: {why_unreadable(error)}", after)))
        return without_figures("failed" if after else "invalid", reason, steps=0), False


def _settings(folder: RunFolder, record: RunRecord, result: Result) -> NodesSettings | Missing:
    """Return the settings; without a sampler, they are missing for the same reason as the samples."""
    nodes = record.environment.nodes if record.environment else ()
    read = read_or_missing("the settings of the nodes", lambda: settings_of_nodes(folder.resources, nodes))
    settings = record.settings if read is None else read
    return result.machine if read is None and not settings and isinstance(result.machine, Missing) else settings


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that ended in any way. ``record`` may still be the one from its start."""

    folder: RunFolder
    record: RunRecord
    result: Result

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def mean_s(self) -> float | None:
        """Return the mean step time if the run was successful."""
        times = self.result.step_time_s if self.result.status == "success" else None
        return times.mean if times else None


def read_ended_run(folder: RunFolder) -> EndedRun:
    """Read the run. Raises UsageError if it has not ended or there is none, EnvironmentProblem if it cannot be read."""
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
    if record.status in ("queued", "running"):
        do = "'llmb jobs wait' waits for it; 'llmb jobs list' shows its state"
        raise UsageError(f"the run has no result yet: it is {record.status}", where=str(folder.path), do=do)
    return EndedRun(folder, record, stored_run(folder, record)[0])


def stored_run(folder: RunFolder, record: RunRecord) -> tuple[Result, Sequence[Step]]:
    """Return an ended run's stored result and, unless it failed, its steps. Nothing is written.

    A run whose files say something else is invalid. Raises BrokenRecord if they cannot be read.
    """
    assert record.status not in ("queued", "running")
    result, failed = record.result, record.status != "success"
    if result is None and failed:
        return with_verdict(without_figures(record.status, record.reason, steps=0), record), ()  # it never began
    if result and failed and result.status == record.status:
        return result, ()
    try:
        steps = read_steps(folder.steps)
    except (BrokenRecord, OSError) as error:
        what = error.what if isinstance(error, BrokenRecord) else f"the run cannot be read: {error.strerror}"
        where = error.where if isinstance(error, BrokenRecord) else error.filename
        raise BrokenRecord(what, where=where, do=f"the steps are in the log: 'llmb parse {folder.log}'") from error
    missing = record.program == ENGINE and not steps
    contradiction = f"there are no steps in {folder.steps}" if missing else why_contradicting(record, steps)
    if result and contradiction is None:
        return result, steps
    return with_verdict(without_figures("invalid", contradiction, len(steps)), record), steps

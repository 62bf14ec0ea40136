# SPDX-License-Identifier: Apache-2.0
"""Concludes runs, whatever ended them, and reads the results of ended runs."""

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
"""Values of errno for files that are not regular or too large."""


def finish_run(folder: RunFolder, record: RunRecord, end: End, spec: JobSpec | None = None) -> Result:
    """Conclude a run, complete its record with network and verdict, and remove the files that the record replaces.

    The result is written before it is judged. With ``spec``, files are also linked, and NCCL's logs added, as the
    recipe's document says. Raises OSError if the steps cannot be read for now, or the record cannot be written.
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
    """Return the record of an ended run with its result, without a verdict. It is not written.

    A nonzero exit code or a signal after completion does not make a run fail, but is noted in its result. Values from
    unreadable files are missing with a reason. Raises OSError if the steps cannot be read now but may be later.
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
    """Return the record with the network that the run used, according to NCCL's logs."""
    assert record.result, "it was concluded"
    network = report_network(folder, record.plan, record.environment or None)
    return record.model_copy(update={"result": record.result.model_copy(update={"network": network})})


def judge_run(record: RunRecord) -> RunRecord:
    """Compare the run with the published figure, and return the record with the verdict or the reason for none."""
    assert record.result, "it was concluded"
    return record.model_copy(update={"result": with_verdict(record.result, record)})


def remove_merged_files(folder: RunFolder, result: Result) -> None:
    """Write the breakdown of a profiled step to its own file, and remove the files that the record now contains."""
    with suppress(OSError):
        write_breakdown(folder, result.profile)
    for file in (folder.environment, folder.vboost, folder.stall):
        with suppress(OSError):
            file.unlink()
    discard_settings(folder.resources)


def _left_beside(folder: RunFolder) -> dict[str, Any]:
    """Read the fields of the record that workers and the batch script wrote to files of their own."""
    fields: dict[str, Any] = {}
    if folder.environment.exists():
        wrote = "what the workers wrote"
        fields["environment"] = read_or_missing(wrote, lambda: read_stored(folder.environment, Environment))
    if folder.vboost.exists():
        wrote = "what the batch script wrote"
        fields["vboost"] = read_or_missing(wrote, lambda: read_stored(folder.vboost, VboostOutcome))
    return fields


def _read_result(folder: RunFolder, record: RunRecord, end: End, after: str | None) -> tuple[Result, bool]:
    """Return the result, and whether the run was complete before ``after``, which describes a failure at its end."""
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
    """Without a sampler, the settings of the nodes are missing for the same reason as the samples."""
    nodes = record.environment.nodes if record.environment else ()
    read = read_or_missing("the settings of the nodes", lambda: settings_of_nodes(folder.resources, nodes))
    settings = record.settings if read is None else read
    return result.machine if read is None and not settings and isinstance(result.machine, Missing) else settings


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, with any result. ``record`` may be from the start of the run, without the result."""

    folder: RunFolder
    record: RunRecord
    result: Result

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def mean_s(self) -> float | None:
        """Return the mean step time in seconds; None if it is unknown or the run did not succeed."""
        times = self.result.step_time_s if self.result.status == "success" else None
        return times.mean if times else None


def read_ended_run(folder: RunFolder) -> EndedRun:
    """Read an ended run; raise UsageError if its record is unreadable or it has not ended, BrokenRecord if its steps
    are unreadable."""
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
    if record.status in ("queued", "running"):
        do = f"run 'llmb watch {folder.path}' to wait for it"
        raise UsageError(f"the run has no result yet: it is {record.status}", where=str(folder.path), do=do)
    return EndedRun(folder, record, stored_run(folder, record)[0])


def stored_run(folder: RunFolder, record: RunRecord) -> tuple[Result, Sequence[Step]]:
    """Return the stored result of an ended run and, if it was recorded as a success, its steps. Nothing is written.

    The result is invalid if the steps contradict it. Raises BrokenRecord if the steps cannot be read."""
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
        raise BrokenRecord(what, where=where, do=f"run 'llmb parse {folder.log}' to read the log") from error
    missing = record.program == ENGINE and not steps
    contradiction = f"there are no steps in {folder.steps}" if missing else why_contradicting(record, steps)
    if result and contradiction is None:
        return result, steps
    return with_verdict(without_figures("invalid", contradiction, len(steps)), record), steps

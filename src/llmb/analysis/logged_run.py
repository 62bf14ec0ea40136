# SPDX-License-Identifier: Apache-2.0
"""The run of a log: what its log and the log's path tell, and the record and the steps beside it where they exist."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut, told_by, without_figures
from llmb.analysis.copies import digest_of
from llmb.analysis.recorded_run import (
    MeasuredWindow,
    described,
    figures_by_steps,
    measure_window,
    planned_window,
    read_folder,
    times_of,
)
from llmb.errors import UsageError
from llmb.input_files import open_regular
from llmb.logs.files import NCCL, FoundFiles, ParsedFile, find_logs, parse_file, parse_logs
from llmb.logs.outcome import FINISHED, LogOutcome, Status, steps_span
from llmb.logs.reader import PlainText
from llmb.metrics.anomalies import Anomalies, find_anomalies
from llmb.metrics.statistics import describe
from llmb.metrics.window import DEFAULT_RULE
from llmb.missing import Missing
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import RunFolder, log_name
from llmb.runs.host import usable_cores
from llmb.runs.identity import RunIdentity, short_id
from llmb.runs.record import RunRecord
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import NOT_SUCCESSFUL
from llmb.runs.steps import Step, read_steps


def run_with_log(folder: RunFolder, file: ParsedFile, rule: str) -> AnalyzedRun:
    """The run of a folder whose log was parsed with a window; its steps count, where it has them all.

    Raises BrokenRecord, or OSError if its record cannot be read.
    """
    recorded = read_folder(folder)
    record, steps = recorded.record, _readable_steps(folder)
    outcome, inside = _outcome(file, record, steps, rule)
    known = replace(
        described(recorded),
        **figures_by_steps(record.plan, outcome.step_time_s, inside),
        figures="exact" if inside else "rounded",
        content=digest_of(outcome.digest, [(step.step, step.step_time_s) for step in steps]),
    )
    return known.with_outcome(replace(file, outcome=outcome))


def _readable_steps(folder: RunFolder) -> list[Step]:
    """Empty for a program that writes its steps to the log alone, and for a file that is damaged."""
    try:
        return read_steps(folder.steps)
    except (OSError, BrokenRecord):
        return []


def _outcome(
    file: ParsedFile, record: RunRecord, steps: Sequence[Step], rule: str
) -> tuple[LogOutcome, tuple[Step, ...]]:
    """With the steps that its figures are of; none for those of the log."""
    outcome = _in_planned_window(file, record, rule)
    contradiction = why_contradicting(record, steps, log_gpus=outcome.gpus)
    if contradiction and (outcome.status in FINISHED or record.status == "success"):
        return without_figures(outcome, contradiction), ()
    outcome = _as_recorded(outcome, record)
    did_all = record.status == "success" or outcome.step_time_s
    if not did_all or outcome.status == "invalid" or record.plan.recipe.pretended_rank is not None:
        return outcome, ()
    try:
        window = record.plan.window if rule == DEFAULT_RULE else planned_window(record.plan, rule)
    except UsageError:
        return outcome, ()
    if sum(step.step in window for step in steps) < window.size:
        return outcome, ()
    return _as_measured(outcome, record, measure_window(record, window, steps), steps)


def _in_planned_window(file: ParsedFile, record: RunRecord, rule: str) -> LogOutcome:
    """A log does not tell the window that the run was planned with; the record does."""
    read, window = file.outcome.window, record.window
    if rule != DEFAULT_RULE or read is None or read == window:
        return file.outcome
    again = parse_file(file.path, f"{window.first}-{window.last}").outcome
    return replace(again, window=window) if again.window else again


def _as_recorded(outcome: LogOutcome, record: RunRecord) -> LogOutcome:
    """The record knows what the log may not: whose it is, whether the run is still running, and how it ended."""
    if outcome.status == "not_training_log":
        said = record.reason or record.plan.recipe.pretended_text
        why = f": {said}" if said else ""
        return replace(outcome, status="no_data", reason=f"no step line; the run is {record.status} by its record{why}")
    if record.status == "invalid":
        return without_figures(outcome, record.reason or "invalid by its record")
    if record.status in ("failed", "cancelled"):
        why = f"the run {'failed' if record.status == 'failed' else 'was cancelled'}, by its record: {record.reason}"
        if outcome.status in FINISHED:
            return replace(without_figures(outcome, why), status="incomplete")
        return replace(outcome, reason=why) if outcome.status in ("no_data", "incomplete") else outcome
    if outcome.status == "incomplete" and record.status in ("queued", "running"):
        done = "no step" if outcome.max_step is None else f"step {outcome.max_step}"
        return replace(outcome, reason=f"the run has not ended, by its record; {done} is the last one in the log")
    return outcome


def _as_measured(
    outcome: LogOutcome, record: RunRecord, found: MeasuredWindow, steps: Sequence[Step]
) -> tuple[LogOutcome, tuple[Step, ...]]:
    """As ``llmb result`` and ``llmb judge`` have it, whatever of the steps the log shows."""
    if isinstance(found.step_time_s, Missing):
        slowed: Status = "traced" if record.plan.nccl_trace else "profiled"
        profiled = len(found.steps) < found.window.size
        status: Status = "invalid" if found.step_time_s == NOT_SUCCESSFUL else slowed if profiled else "too_few_steps"
        return replace(without_figures(outcome, found.flaw or ""), status=status), ()
    times, attempts = times_of(found.steps), len(record.attempts)
    shown = replace(outcome, step_times_s=times, step_time_s=describe(times))
    if outcome.status == "success" and outcome.window == found.window:
        return shown, found.steps
    reason = f"{steps_span(found.window.first, found.window.last)} of {record.plan.last_step + 1}"
    told = replace(
        shown,
        status="success",
        reason=f"{reason} (attempt {attempts})" if attempts > 1 else reason,
        window=found.window,
        tflops_per_gpu=None,
    )
    return told if outcome.steps else _with_steps(told, steps, attempts), found.steps


def _with_steps(outcome: LogOutcome, steps: Sequence[Step], attempts: int) -> LogOutcome:
    """What else a log tells that has no step or was not read."""
    first, last = steps[0], steps[-1]
    return replace(
        outcome,
        steps=len(steps),
        attempts=max(attempts, 1),
        max_step=last.step,
        loss_first=first.loss,
        loss_last=last.loss,
    )


if TYPE_CHECKING:  # few logs have NCCL's lines
    from llmb.traces.nccl_network import Network

MOST_BYTES = 1 << 25
CHUNK_BYTES = 1 << 20
_AROUND_EXPERIMENT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:_\d+)*\.out(?:\.gz)?$")
"""Parts of a log's name that are left out: the account, and the numbers of the job and of its start."""


def parsed_run(path: Path, rule: str) -> AnalyzedRun:
    """The run that a file is the log of, by the steps of the window ``rule``."""
    return known_run(parse_file(path, rule), rule)


def known_run(file: ParsedFile, rule: str = DEFAULT_RULE) -> AnalyzedRun:
    """The run that a file which was parsed with a window is the log of."""
    parts = file.path.absolute().parts
    folder = RunFolder(file.path.absolute().parent) if parts[-1] == log_name(parts[-2:][0]) else None
    if not folder or not folder.record.is_file():
        return logged_run(file, _anomalies(file.outcome))
    run = _by_record(folder, file, rule)
    return replace(run, anomalies=_anomalies(run.outcome))


def _by_record(folder: RunFolder, file: ParsedFile, rule: str) -> AnalyzedRun:
    """By its log alone if the record cannot be read."""
    from llmb.analysis.logged_run import run_with_log  # takes longer to load than to read a hundred logs

    try:
        return run_with_log(folder, file, rule)
    except OSError as error:
        unread = error.strerror or "it cannot be read"
    except BrokenRecord as error:
        unread = error.what
    return replace(logged_run(file), id=short_id(str(folder.path)), unread_record=unread)


def logged_run(file: ParsedFile, anomalies: Anomalies | None = None) -> AnalyzedRun:
    """The run of a log alone."""
    network = _network(file.path) if file.outcome.steps and file.may_name_network else None
    digest = file.outcome.digest
    return AnalyzedRun(
        id=short_id(str(file.path.absolute())),
        path=file.path,
        identity=log_identity(file) if _is_run(file) else RunIdentity(configuration={}),
        conditions={"fabric": network.fabric} if network else {},
        started_s=_written_s(file.path),
        anomalies=anomalies,
        network=network,
        source=digest,
        content=digest,
        **told_by(file),
    )


def log_identity(file: ParsedFile) -> RunIdentity:
    """Equal for logs of repeats.

    The name counts as a whole if it does not tell what was trained: two runs are not taken for repeats because nothing
    is known of either.
    """
    outcome = file.outcome
    known = dict(outcome.configuration)
    if outcome.format:
        known["program"] = outcome.format
    if "workload" not in known:
        known["experiment"] = _AROUND_EXPERIMENT.sub("", file.path.name)
    return RunIdentity(configuration=known)


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _anomalies(outcome: LogOutcome) -> Anomalies | None:
    """None unless the steps of the window follow each other."""
    times, window = outcome.step_times_s, outcome.window
    if not window or len(times) != window.size:
        return None
    return find_anomalies(times, window.first)


def _network(path: Path) -> "Network | None":
    """By the beginning of a log, whichever program wrote it; None if it does not tell or cannot be read."""
    try:
        with open_regular(path) as stream:
            said = filter(_has_nccl, _beginning(PlainText(stream)))
            if not (first := next(said, None)):
                return None
            from llmb.traces.nccl_network import read_network

            return read_network(chain([first], said), str(path))
    except OSError:
        return None


def _has_nccl(text: bytes) -> bool:
    return NCCL in text


def _beginning(text: PlainText) -> Iterator[bytes]:
    """Complete lines, many at once; a line longer than a chunk is split."""
    rest = b""
    while text.size < MOST_BYTES and (part := text.read(CHUNK_BYTES)):
        lines = rest + part
        end = max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1 or len(lines)
        yield lines[:end]
        rest = lines[end:]
    yield rest


def logged_runs(root: Path, recorded: Collection[Path]) -> FoundRuns:
    """The runs of a log, or of all logs below a folder but those in the run folders ``recorded``."""
    logs = _logs_outside(root, recorded)
    files = sorted(parse_logs(logs, DEFAULT_RULE, usable_cores()), key=lambda file: file.path)
    runs = tuple(logged_run(file) for file in files if _is_run(file))
    unread = tuple(LeftOut(str(file.path), file.outcome.reason) for file in files if not _is_run(file))
    return FoundRuns(str(root), runs, unread)


def _logs_outside(root: Path, recorded: Collection[Path]) -> FoundFiles:
    try:
        found = find_logs(root)
    except UsageError:
        return FoundFiles((), 0, ())
    known = frozenset(recorded)
    logs = tuple(path for path in found.logs if known.isdisjoint(path.absolute().parents))
    refused = tuple(file for file in found.refused if known.isdisjoint(file.path.absolute().parents))
    return FoundFiles(logs, sum(path.stat().st_size for path in logs), refused)


def _is_run(file: ParsedFile) -> bool:
    return file.outcome.status not in ("not_training_log", "unreadable")

# SPDX-License-Identifier: Apache-2.0
"""Runs that are known by their logs alone. What one computed is known as far as its log and the log's path tell."""

from collections.abc import Collection
from pathlib import Path

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut
from llmb.analysis.logged_network import logged_network
from llmb.analysis.parsed_run import log_identity
from llmb.errors import UsageError
from llmb.logs.files import FoundFiles, ParsedFile, find_logs, parse_file
from llmb.logs.parallel_reader import parse_logs
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.host import usable_cores
from llmb.runs.identity import short_id


def logged_runs(root: Path, recorded: Collection[Path]) -> FoundRuns:
    """Reads a log, or all logs below a folder but those in the run folders ``recorded``."""
    logs = _logs_outside(root, recorded)
    files = sorted(parse_logs(logs, DEFAULT_RULE, usable_cores()), key=lambda file: file.path)
    runs = tuple(_analyzed_log(file) for file in files if _is_run(file))
    unread = tuple(LeftOut(str(file.path), file.outcome.reason) for file in files if not _is_run(file))
    return FoundRuns(str(root), runs, unread)


def log_read_again(path: Path, rule: str) -> AnalyzedRun:
    """The run of a log with the window ``rule``."""
    return _analyzed_log(parse_file(path, rule))


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


def _analyzed_log(file: ParsedFile) -> AnalyzedRun:
    outcome, network = file.outcome, logged_network(file.path)
    return AnalyzedRun(
        id=short_id(str(file.path.absolute())),
        path=file.path,
        identity=log_identity(file),
        conditions={"fabric": network.fabric} if network else {},
        started_s=file.path.stat().st_mtime,
        status=outcome.status,
        reason=None if outcome.status == "success" else outcome.reason,
        window=outcome.window,
        step_times_s=tuple(outcome.step_times_s),
        step_time_s=outcome.step_time_s,
        source=outcome.digest,
        content=outcome.digest,
    )

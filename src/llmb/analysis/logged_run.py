# SPDX-License-Identifier: Apache-2.0
"""The run of a log: what its log and the log's path tell, and the record beside it where there is one."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, LeftOut, told_by
from llmb.errors import UsageError
from llmb.input_files import open_regular
from llmb.logs.configuration import ARGUMENTS
from llmb.logs.files import NCCL, FoundFiles, ParsedFile, find_logs, parse_file, parse_logs
from llmb.logs.outcome import LOG_WARNING, LogOutcome
from llmb.logs.reader import PlainText
from llmb.metrics.anomalies import Anomalies, find_anomalies
from llmb.metrics.window import DEFAULT_RULE
from llmb.resources.host import usable_cores
from llmb.runs.folder import BrokenRecord, RunFolder, log_name
from llmb.runs.identity import RunIdentity, short_id
from llmb.verdict.conditions import ERROR_AT_END

if TYPE_CHECKING:  # few logs have NCCL's lines
    from llmb.traces.nccl_network import Network

MOST_BYTES = 1 << 25
CHUNK_BYTES = 1 << 20
_AROUND_EXPERIMENT = re.compile(
    r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:[_-]?\d+)*\.(?:out|log)(?:\.gz)?$"
)
"""Parts of a log's name that are left out: the account, and the numbers of the job and of its start, or of a repeat."""


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
    from llmb.analysis.recorded_log import run_with_log  # takes longer to load than to read a hundred logs

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
        faults=_faults(file.outcome),
        source=digest,
        content=digest,
        **told_by(file),
    )


def _faults(outcome: LogOutcome) -> dict[str, tuple[str, ...]]:
    found = {LOG_WARNING: outcome.warnings, ERROR_AT_END: tuple(filter(None, [outcome.error_at_end]))}
    return {name: texts for name, texts in found.items() if texts}


def log_identity(file: ParsedFile) -> RunIdentity:
    """Equal for logs of repeats.

    The name counts, without the number at its end, if neither it nor the log tells what was trained: two runs are not
    taken for repeats because nothing is known of either.
    """
    outcome = file.outcome
    known = dict(outcome.configuration)
    if outcome.format:
        known["program"] = outcome.format
    if "workload" not in known and ARGUMENTS not in known:
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

            return read_network(chain([first], said), str(path)) or None
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

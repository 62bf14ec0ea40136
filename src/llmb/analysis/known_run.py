# SPDX-License-Identifier: Apache-2.0
"""Finds what is known of the run that a log is of."""

from pathlib import Path

from llmb.analysis.logged_network import logged_network
from llmb.analysis.parsed_run import ParsedRun, anomalies_of, log_identity
from llmb.logs.files import ParsedFile, parse_file
from llmb.runs.folder import RunFolder
from llmb.runs.identity import short_id
from llmb.runs.record_file import BrokenRecord


def parsed_run(path: Path, rule: str) -> ParsedRun:
    """The run that a file is the log of, by the steps of the window ``rule``."""
    return known_run(parse_file(path, rule))


def known_run(file: ParsedFile) -> ParsedRun:
    """The run that a file which was parsed is the log of."""
    path = file.path.absolute()
    folder = RunFolder(path.parent)
    is_run, unread_record = path.name == folder.log.name and folder.record.is_file(), None
    if is_run:
        from llmb.analysis.recorded_log import recorded_run  # takes longer to load than to read a hundred logs

        try:
            return recorded_run(file, folder)
        except OSError as error:
            unread_record = error.strerror or "it cannot be read"
        except BrokenRecord as error:
            unread_record = error.what
    return ParsedRun(
        file=file,
        id=short_id(str(folder.path if is_run else path)),
        unread_record=unread_record,
        configuration=log_identity(file).configuration if file.outcome.steps else {},
        figures="rounded" if file.outcome.step_time_s else None,
        time_s=_written_s(file.path),
        anomalies=anomalies_of(file.outcome),
        network=logged_network(path) if file.outcome.steps else None,
    )


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None

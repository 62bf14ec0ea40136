# SPDX-License-Identifier: Apache-2.0
"""Finds NCCL logs and nccl-tests output."""

from collections.abc import Iterable
from pathlib import Path

from llmb.errors import UsageError
from llmb.input_files import list_folder
from llmb.traces.folders import NCCL_FOLDER, NCCL_LOG_END

EXPECTED = (
    "lines 'NCCL INFO AllReduce: opCount ...'",
    "tables of nccl-tests, '# size count type redop root time algbw busbw #wrong'",
)


def find_nccl_files(paths: Iterable[Path]) -> list[Path]:
    """The given files and, for a folder, the logs that runs with ``--nccl-trace`` wrote in it or below it.

    Raises UsageError if a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        found += _in_folder(path) if path.is_dir() else [path]
    return found


def _in_folder(folder: Path) -> list[Path]:
    homes = [folder] if folder.name == NCCL_FOLDER else sorted(folder.rglob(NCCL_FOLDER))
    logs = [path for home in homes if home.is_dir() for path in list_folder(home) if path.name.endswith(NCCL_LOG_END)]
    if not logs:
        advice = f"give a log file, or the folder of a run with --nccl-trace ({NCCL_FOLDER}/*{NCCL_LOG_END})"
        raise UsageError("no NCCL log in this folder", where=str(folder), choices=EXPECTED, do=advice)
    return sorted(logs, key=lambda path: (len(path.name), path.name))

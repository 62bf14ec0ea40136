# SPDX-License-Identifier: Apache-2.0
"""Checks of several nodes, kept below the root of installation: a folder per check, with a report per node. The newest
and the one before are kept.
"""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.health.records import CheckOptions, NodeReport
from llmb.jobs.task import CHECKS
from llmb.resources.settings import NodeSettings
from llmb.runs.folder import RunFolder, create_numbered, write_atomically, write_newest, writing
from llmb.runs.record_file import read_record_file
from llmb.trust import STATE_FOLDER

OF_SETTINGS = "settings-"
"""How folders begin in which nothing was checked."""
PAIRWISE = Path(STATE_FOLDER) / "pairwise.json"
STAMP = "%Y%m%dT%H%M%SZ"
HOW_TO_CHECK = "check nodes with 'llmb doctor --nodes LIST' or 'llmb doctor --partition NAME'"
HOW_TO_MEASURE = "measure again with 'llmb bench collectives --pairwise --nodes N'"


class NoCheck(UsageError):
    """No check of nodes is kept."""


class NodesRequest(CheckOptions):
    """What every node of a check is asked."""

    started_at: str
    """ISO 8601 in UTC."""
    nodes: tuple[str, ...]
    settings: bool = False
    """Nothing is checked, and the settings of the nodes are read."""


class NodesResult(Record):
    """A check of several nodes."""

    started_at: str
    reports: tuple[NodeReport, ...]
    """In the order in which the nodes were asked for."""

    @property
    def unfit(self) -> list[str]:
        return [report.node for report in self.reports if report.status == "fail"]

    @property
    def unchecked(self) -> list[str]:
        """Neither fit nor unfit."""
        return [report.node for report in self.reports if report.status != "fail" and not report.answered]

    @property
    def fit(self) -> list[str]:
        return [report.node for report in self.reports if report.status != "fail" and report.answered]


class JudgedNodes(Record):
    """What measurements between nodes have said of each: a kept file of its own, beside the checks."""

    schema_version: Literal[1] = 1
    started_at: str
    fit: tuple[str, ...]
    unfit: tuple[str, ...]
    undecided: tuple[str, ...]


class CheckFolder:
    """The files of one check. Those of llmb itself begin with a dot, as no node's name does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request = path / ".request.json"
        self.result = path / ".result.json"

    def report(self, node: str) -> Path:
        return self.path / f"{node}.json"

    def job(self, node: str) -> RunFolder:
        """Batch script and output of a node's job."""
        return RunFolder(self.path / ".jobs" / node / "doctor")

    def settings(self, node: str) -> Path:
        return self.path / f".settings-{node}.json"

    def read_settings(self, node: str) -> NodeSettings:
        """Raises OSError and BrokenRecord."""
        return read_record_file(self.settings(node), NodeSettings)

    def read_report(self, node: str) -> NodeReport:
        """Raises OSError and BrokenRecord."""
        return read_record_file(self.report(node), NodeReport)

    def read_request(self) -> NodesRequest:
        """Raises OSError and BrokenRecord."""
        return read_record_file(self.request, NodesRequest)


def new_check(install: Path, request: NodesRequest) -> CheckFolder:
    """Raises NotWritable. The second check of a second gets a number. Of those that have ended, one is left."""
    parent = install / CHECKS
    stamp = datetime.fromisoformat(request.started_at).strftime(STAMP)
    name = f"{OF_SETTINGS}{stamp}" if request.settings else stamp
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = CheckFolder(create_numbered(parent, name, Path.mkdir))
        write_atomically(folder.request, request.model_dump_json(indent=2) + "\n")
    ended = [path for path in _checks(install, settings=request.settings) if CheckFolder(path).result.exists()]
    for path in ended[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def write_result(folder: CheckFolder, result: NodesResult) -> None:
    """Raises NotWritable."""
    with writing(folder.path):
        write_atomically(folder.result, result.model_dump_json(indent=2) + "\n")


def discard(folder: CheckFolder) -> None:
    """Removes a check that asked no node."""
    shutil.rmtree(folder.path, ignore_errors=True)


def write_judged(install: Path, judged: JudgedNodes) -> Path:
    """Raises NotWritable."""
    path = install / PAIRWISE
    write_newest(path, judged.model_dump_json(indent=2) + "\n")
    return path


def last_judged(install: Path) -> JudgedNodes | None:
    """None if nothing is kept. Raises BrokenRecord, and OSError for a file that cannot be read."""
    path = install / PAIRWISE
    return read_record_file(path, JudgedNodes) if path.exists() else None


def last_check(install: Path) -> CheckFolder:
    """Raises NoCheck if none is kept."""
    folders = [path for path in _checks(install, settings=False) if (path / ".request.json").is_file()]
    if not folders:
        raise NoCheck("no check of nodes is kept", where=str(install / CHECKS), do=HOW_TO_CHECK)
    return CheckFolder(folders[-1])


def _checks(install: Path, *, settings: bool) -> list[Path]:
    """The oldest first."""
    made = (install / CHECKS).glob("*")
    return sorted((path for path in made if path.name.startswith(OF_SETTINGS) is settings), key=_stamp)


def _stamp(path: Path) -> tuple[str, int]:
    stamp, _, number = path.name.removeprefix(OF_SETTINGS).partition("-")
    return stamp, int(number) if number.isdecimal() else 1


def age_s(started_at: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds()

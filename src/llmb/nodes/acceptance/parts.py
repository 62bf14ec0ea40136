# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of an acceptance, each of which is an llmb command with a saved result.

A part with a saved result is not repeated, so that a killed acceptance continues where it stopped.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmb.base.errors import EnvironmentProblem, InfrastructureError, LlmbError, RunFailed, UsageError, UserInterrupt
from llmb.base.processes import Interrupted, Process, started_program
from llmb.catalogue.records import Record
from llmb.runs.folder import ROOT_VARIABLES, BrokenRecord, read_stored, write_atomically, writing

ANSWERS = (0, 4, 5, 6)
"""Exit codes that are results: success, and failed checks, runs or verdicts."""
ERRORS: Mapping[int, type[LlmbError]] = {2: UsageError, 3: EnvironmentProblem, 7: InfrastructureError}
Status = Literal[
    "pass", "warn", "measured", "improved", "fail", "regressed", "inconclusive", "not comparable", "invalid", "left out"
]


class PartResult(Record):
    """The output and exit code of a command, saved as ``NAME.json`` in the folder of the acceptance."""

    schema_version: Literal[1] = 1
    command: tuple[str, ...]
    """The arguments after ``llmb``."""
    exit_code: int
    seconds: float
    error: str | None = None
    document: dict[str, Any] | None = None
    """The command's JSON output; None if it printed nothing, or if the part is only planned."""


class AcceptancePart(Record):
    """A row in the table of an acceptance."""

    name: str
    status: Status
    value: str
    reference: str | None = None
    """The value to compare with, if any."""
    command: str | None = None
    """The command that printed the result, if any."""
    training: bool = False
    """True if the part measures the speed of training."""


class AcceptanceResult(Record):
    """The content of ``result.json``. Its keys are part of the public interface."""

    schema_version: Literal[1] = 1
    verdict: Literal["pass", "fail", "regressed", "inconclusive"]
    sentence: str
    subject: str
    started_at: str
    seconds: float
    label: str
    """The label of the runs, or the common prefix of their labels."""
    parts: tuple[AcceptancePart, ...]
    unfit: tuple[str, ...]
    """The unfit nodes."""
    page: str | None
    archive: str | None
    """Path of the archive of the runs; None if nothing was trained."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part that is only planned, with its command and the expected seconds."""

    name: str
    command: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """The parts of an acceptance, which are run or, without a ``folder``, only planned."""

    folder: Path | None
    install: Path
    on_line: Callable[[str], object]
    say: Callable[[str], None]
    planned: list[PlannedPart] = field(default_factory=list)
    done: list[PartResult] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the seconds that all parts took so far, including parts with saved results."""
        return sum(part.seconds for part in self.done)

    def do(self, name: str, *command: str, seconds: float, variables: Mapping[str, str] | None = None) -> PartResult:
        """Run a command unless its result is saved, and return the result; without a folder, only plan the command.

        Raises the command's error if its exit code is not in ``ANSWERS``, UserInterrupt on a signal, NotWritable if
        saving fails.
        """
        if self.folder is None:
            self.planned.append(PlannedPart(name, " ".join(("llmb", *command)), seconds))
            return PartResult(command=command, exit_code=0, seconds=0)
        path = self.folder / f"{name}.json"
        result = self._kept(path)
        if result is None:
            self.say(f"{name}: llmb {' '.join(command)}")
            result = self._call(command, {**os.environ, ROOT_VARIABLES[0]: str(self.install), **(variables or {})})
            with writing(path):
                write_atomically(path, result.model_dump_json(indent=2) + "\n")
        self.done.append(result)
        return result

    def _kept(self, path: Path) -> PartResult | None:
        try:
            return read_stored(path, PartResult) if path.exists() else None
        except BrokenRecord:
            self.say(f"{path.name} is damaged; running the part again")
            return None

    def _call(self, command: Sequence[str], environ: Mapping[str, str]) -> PartResult:
        words = [sys.executable, "-P", "-m", "llmb.cli.main", *command, "--json"]
        began, document = time.monotonic(), None
        with tempfile.TemporaryFile() as output:
            try:
                with started_program(words, output, subprocess.PIPE, environ) as process:
                    error = self._relay(process)
            except Interrupted as signal:
                raise UserInterrupt(f"interrupted by {signal}", do="repeat the command, without --new") from signal
            output.seek(0)
            if text := output.read():
                document = json.loads(text)
        _raise_unless_answered(process.returncode, error or {}, command)
        return PartResult(
            command=tuple(command),
            exit_code=process.returncode,
            seconds=time.monotonic() - began,
            error=(error or {}).get("what"),
            document=document,
        )

    def _relay(self, process: Process) -> dict[str, Any] | None:
        error = None
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith('{"error"'):
                    error = json.loads(text)["error"]
                else:
                    self.on_line(text)
        process.wait()
        return error


def _raise_unless_answered(code: int, error: Mapping[str, Any], command: Sequence[str]) -> None:
    if code in ANSWERS:
        return
    how = f"the command was killed by signal {-code}" if code < 0 else f"the command ended with exit code {code}"
    where = error.get("where") or f"llmb {' '.join(command)}"
    raise ERRORS.get(code, RunFailed)(error.get("what") or how, where=where, do=error.get("do"))

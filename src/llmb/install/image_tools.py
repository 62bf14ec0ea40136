# SPDX-License-Identifier: Apache-2.0
"""Calls the tools that import images, shows what they print, and explains their errors."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError, RunFailed, UserInterrupt
from llmb.processes.families import started_program
from llmb.processes.signals import Interrupted
from llmb.secrets import redacted

ERRORS = Path(__file__).with_name("image_errors.yaml")
TAIL_BYTES = 16384
SHOWN_LINES = 4
POLL_S = 0.5
PROGRESS_S = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ToolError(Record):
    """Something that a tool says when it fails."""

    pattern: str
    kind: Literal["environment", "infrastructure"]
    program: str | None = None
    what: str
    do: str


class ToolErrors(Record):
    """``image_errors.yaml``."""

    errors: tuple[ToolError, ...] = Field(min_length=1)


def run_tool(command: Sequence[str], result: Path, say: Callable[[str], None]) -> None:
    """Shows on standard error what a tool prints, and how large the result is; the tool ends with this process.

    Raises the error that the tool's last lines explain, and UserInterrupt.
    """
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            with started_program(command, output, output) as process:
                _follow(process, output.fileno(), result, say)
        except Interrupted as signal:
            raise UserInterrupt(f"interrupted by {signal}; the same command imports the image again") from signal
        size = os.fstat(output.fileno()).st_size
        tail = os.pread(output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
    if process.returncode:
        raise explained(Path(command[0]).name, process.returncode, tail)


def _follow(process: "subprocess.Popen[bytes]", output: int, result: Path, say: Callable[[str], None]) -> None:
    """Until the tool has ended."""
    spoke_at, ended, position = time.monotonic(), False, 0
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            ended = True
        while block := os.pread(output, TAIL_BYTES, position):
            position += len(block)
            sys.stderr.write(block.decode(errors="replace"))
            sys.stderr.flush()
        if not ended and time.monotonic() - spoke_at > PROGRESS_S:
            size = result.stat().st_size if result.exists() else 0
            say(f"still importing: {size / 10**9:.1f} GB written")
            spoke_at = time.monotonic()


def explained(program: str, code: int, text: str) -> LlmbError:
    """The error for a tool that ended with ``code`` and printed ``text``, the end of its output."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", _ESCAPES.sub("", text)) if line.strip()]
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    for error in read_file(ERRORS, ToolErrors).errors:
        said = [line for line in lines if re.search(error.pattern, line, re.IGNORECASE)]
        if said and error.program in (None, program):
            kind = InfrastructureError if error.kind == "infrastructure" else EnvironmentProblem
            return kind(f"{error.what}: {program} {how}{_quoted(said[-1:])}", do=error.do)
    return RunFailed(f"{program} {how}{_quoted(lines[-SHOWN_LINES:])}")


def _quoted(lines: Sequence[str]) -> str:
    return "".join(f"\n  | {redacted(line)}" for line in lines)


def has_tool(program: str) -> bool:
    return shutil.which(program) is not None

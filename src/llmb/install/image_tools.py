# SPDX-License-Identifier: Apache-2.0
"""Calls the tools that import images, shows what they print, and explains their errors."""

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError, RunFailed, UserInterrupt
from llmb.processes.families import end_tree
from llmb.processes.signals import Interrupted, signals_as_exceptions
from llmb.runs.parent_death import PARENT_DEATH
from llmb.secrets import redacted

ERRORS = Path(__file__).with_name("image_errors.yaml")
TAIL_BYTES = 16384
SHOWN_LINES = 4
SILENT_S = 30.0
"""A tool that prints nothing for so long is reported to be at work."""
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


def run_tool(command: Sequence[str], written: Callable[[], int], say: Callable[[str], None]) -> None:
    """Shows what a tool prints on standard error, as a terminal if that is one; the tool ends with this process.

    written: bytes of the result so far. Raises the error that the tool's last lines explain, and UserInterrupt.
    """
    guarded = [sys.executable, "-P", "-m", PARENT_DEATH, str(os.getpid()), *command]
    reading, writing = _terminal() if sys.stderr.isatty() else os.pipe()
    tail = deque[bytes](maxlen=TAIL_BYTES // 512)
    try:
        with signals_as_exceptions() as signals:
            process = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, start_new_session=True
            )
            os.close(writing)
            try:
                signals.let_through()
                _follow(reading, process, tail, written, say)
            except Interrupted as signal:
                end_tree(process)
                raise UserInterrupt(f"interrupted by {signal}; the same command imports the image again") from signal
            except BaseException:
                end_tree(process)
                raise
    finally:
        os.close(reading)
    if process.returncode:
        raise explained(Path(command[0]).name, process.returncode, b"".join(tail).decode(errors="replace"))


def _terminal() -> tuple[int, int]:
    """Both ends of a terminal as wide as the one that is there: tools draw their progress on one alone."""
    reading, writing = pty.openpty()
    size = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    modes = termios.tcgetattr(writing)
    modes[1] &= ~termios.OPOST  # the terminal that shows it ends lines itself
    termios.tcsetattr(writing, termios.TCSANOW, modes)
    return reading, writing


def _follow(
    reading: int,
    process: "subprocess.Popen[bytes]",
    tail: deque[bytes],
    written: Callable[[], int],
    say: Callable[[str], None],
) -> None:
    """Until the tool has ended; what it left running may hold the other end of the pipe for longer."""
    spoke_at = time.monotonic()
    while True:
        ended = process.poll() is not None
        if select.select([reading], [], [], 0 if ended else 0.5)[0]:
            if not (block := _read(reading)):
                break
            tail.append(block)
            sys.stderr.write(block.decode(errors="replace"))
            sys.stderr.flush()
            spoke_at = time.monotonic()
        elif ended:
            break
        elif time.monotonic() - spoke_at > SILENT_S:
            say(f"still importing: {written() / 10**9:.1f} GB written")
            spoke_at = time.monotonic()
    process.wait()


def _read(reading: int) -> bytes:
    try:
        return os.read(reading, 512)
    except OSError:  # a terminal whose other end is closed
        return b""


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

# SPDX-License-Identifier: Apache-2.0
"""Runs a program that reports on standard output, line by line, and ends it on request."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from llmb.errors import RunFailed, UserInterrupt
from llmb.processes.families import started_program
from llmb.processes.signals import Interrupted

LAST_LINES = 12


class Ended(NamedTuple):
    """How a program ended: its exit code, negative for a signal, and the last lines of its standard error."""

    code: int
    last_lines: tuple[str, ...]

    def failure(self, program: str) -> RunFailed:
        """For a program that left no error of its own."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return RunFailed(f"{program} {how}" + "".join(f"\n  | {line}" for line in self.last_lines))


def run_talking(
    program: Sequence[str], variables: Mapping[str, str], on_line: Callable[[bytes], None], if_interrupted: str
) -> Ended:
    """Returns when ``program``, words after the Python interpreter, has ended; it never outlives this process.

    if_interrupted: what is left if a signal ends the program, for the message of UserInterrupt.
    """
    with tempfile.TemporaryFile() as talk:
        try:
            with started_program([sys.executable, *program], subprocess.PIPE, talk, variables) as process:
                _follow(process, on_line)
        except Interrupted as signal:
            raise UserInterrupt(f"interrupted by {signal}; {if_interrupted}") from signal
        return Ended(process.returncode, _last_lines(talk))


def _follow(process: "subprocess.Popen[bytes]", on_line: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            on_line(line)
    process.wait()


def _last_lines(talk: IO[bytes]) -> tuple[str, ...]:
    talk.seek(0)
    return tuple(talk.read().decode(errors="replace").splitlines()[-LAST_LINES:])

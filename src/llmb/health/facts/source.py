# SPDX-License-Identifier: Apache-2.0
"""Where facts are read: files below a root folder, and programs, each with a time limit."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

LAST_WORDS = 200
"""Characters of a program's last line that are shown."""
GRACE_S = 2.0
"""How long a program may take to end after SIGTERM, and after SIGKILL."""


class Missing(NamedTuple):
    """A fact that is not known, and why."""

    reason: str


class Said(NamedTuple):
    """What a program printed; ``problem`` is None if it succeeded."""

    text: str
    problem: str | None = None
    timed_out: bool = False


Ask = Callable[[Sequence[str], float], Said]


def ask_program(command: Sequence[str], limit_s: float) -> Said:
    """Runs a program; never raises for one that is missing, fails, or hangs even when it is killed.

    A process that waits for a device or a file system cannot be killed, and is left behind.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd="/",
                start_new_session=True,
            )
        except FileNotFoundError:
            return Said("", f"{command[0]} is not on this machine")
        except OSError as error:
            return Said("", f"{command[0]} cannot be started: {error.strerror}")
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Said(_text(output), f"{command[0]} did not answer within {limit_s:g} s", timed_out=True)
        except BaseException:
            _end(process)
            raise
        said = _text(output)
        return Said(said, f"{command[0]}: {_last_words(_text(errors), said, code)}" if code else None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            return


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _last_words(errors: str, said: str, code: int) -> str:
    lines = [line.strip() for line in (errors.strip() or said).splitlines() if line.strip()]
    return lines[-1][:LAST_WORDS] if lines else f"exit code {code} with no output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node; in tests, a recorded tree of files and the recorded output of programs."""

    root: Path = Path("/")
    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """None if it cannot be read, as many files of a device that is off."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        try:
            return int(text) if text else None
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """What a folder contains, in natural order; empty if it cannot be read."""
        try:
            found = [path.name for path in self.path(folder).iterdir()]
        except OSError:
            return []
        return sorted(found, key=lambda name: (len(name), name))

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False

# SPDX-License-Identifier: Apache-2.0
"""Starts programs, reads their output, and ends them together with all processes that they started."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from llmb.base.errors import RunFailed, UserInterrupt
from llmb.base.parent_death import ending_with_this
from llmb.base.tools import ask_program

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """This process was asked to end: by Ctrl-C, a closed terminal, or SIGTERM from a scheduler."""


class SignalGate:
    """Defers the first signal of ``ENDING`` until the code that ends the started program is ready."""

    def __init__(self) -> None:
        self.open = False
        self.name: str | None = None

    def take(self, number: int, frame: object) -> None:  # noqa: ARG002 (as the signal module calls it)
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        self.name = signal.Signals(number).name
        if self.open:
            raise Interrupted(self.name)

    def let_through(self) -> None:
        self.open = True
        if self.name:
            raise Interrupted(self.name)


@contextmanager
def signals_as_exceptions() -> Iterator[SignalGate]:
    """Raise Interrupted for the first signal of ``ENDING`` once the gate is open; ignore further signals."""
    gate = SignalGate()
    previous = {number: signal.signal(number, gate.take) for number in ENDING}
    try:
        yield gate
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


PROC = Path("/proc")
PROCESSES = ["ps", "-A", "-o", "pid=,ppid="]
"""The command to list processes if there is no /proc, as on macOS; minimal images lack ps."""
PS_LIMIT_S = 30
BEGAN = 19
"""Index of the start time among the fields of ``stat`` after the program's name."""
BETWEEN_S = 0.5
GRACE_S = 8.0
"""Seconds that a program has to end after a request; then it is killed with its descendants."""
Process = subprocess.Popen[bytes]
Stream = IO[bytes] | int


@contextmanager
def started_program(
    command: Sequence[str], output: Stream, errors: Stream, environ: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Start a program that, on Linux, ends with this process. An exception in the block ends it and its descendants."""
    with signals_as_exceptions() as signals:
        # A session of its own: Ctrl-C in a terminal reaches this process only, which then ends the others in order.
        process = subprocess.Popen(
            ending_with_this(command),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            signals.let_through()
            yield process
        except BaseException:
            end_tree(process)
            raise


def waiting_for(process: Process) -> threading.Event:
    """Return an event that a thread sets when the process has ended: polling would disturb the measurement."""
    ended = threading.Event()

    def wait() -> None:
        process.wait()
        ended.set()

    threading.Thread(target=wait, name="end of a program", daemon=True).start()
    return ended


def end_stalled(process: Process) -> None:
    """Wait up to ``GRACE_S`` for ``process`` to end; if it does not, end it and its descendants."""
    wait_for_stopped(process)
    if process.poll() is None:
        end_tree(process)


def end_tree(process: Process) -> None:
    """Ask a program to end; after at most ``GRACE_S`` seconds, kill it and its descendants."""
    started = {pid: _began(pid) for pid in family(process.pid)}
    process.terminate()
    wait_for_stopped(process)
    if process.poll() is None:
        started |= {pid: _began(pid) for pid in family(process.pid)}
    for pid, began in started.items():
        if pid != process.pid and _began(pid) == began:  # else it has ended, and its id may be another process's
            signal_process(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def wait_for_stopped(process: Process) -> None:
    """Wait up to ``GRACE_S`` for ``process`` to end; resume it and its descendants, so that suspended ones can end."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end:
        for pid in family(process.pid):
            signal_process(pid, signal.SIGCONT)
        try:
            process.wait(BETWEEN_S)
        except subprocess.TimeoutExpired:
            continue
        return


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _by_proc() if (PROC / "self" / "stat").exists() else _by_ps():
        children.setdefault(parent, []).append(child)
    pids = [pid]
    for member in pids:
        pids.extend(children.get(member, []))
    return pids


def _began(pid: int) -> str:
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[BEGAN]
    except (OSError, IndexError):
        return ""


def _by_proc() -> Iterator[tuple[int, int]]:
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            _, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        yield int(stat.parent.name), int(parent)


def _by_ps() -> Iterator[tuple[int, int]]:
    for line in ask_program(PROCESSES, PS_LIMIT_S).text.splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
            yield int(fields[0]), int(fields[1])


LAST_LINES = 12


class Ended(NamedTuple):
    """A program's exit code, negative for a signal, and the last lines of its standard error."""

    code: int
    last_lines: tuple[str, ...]

    def failure(self, program: str) -> RunFailed:
        """Return an error with the program's last lines, for a program that reported no error itself."""
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return RunFailed(f"{program} {how}" + "".join(f"\n  | {line}" for line in self.last_lines))


def run_talking(
    program: Sequence[str], variables: Mapping[str, str], on_line: Callable[[bytes], None], if_interrupted: str
) -> Ended:
    """Run Python with the arguments ``program``, and call ``on_line`` with each output line. Raise UserInterrupt for a
    signal."""
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

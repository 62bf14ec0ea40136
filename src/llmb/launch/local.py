# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on this machine: starts the workers, follows their steps, ends them when asked to."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmb.launch.stalled import StoppedFamily, family, signal_process, wait_for_stopped
from llmb.runs.folder import RunFolder, cannot_write
from llmb.runs.steps import Step, step_from_json

LAUNCHER_PID = "LLMB_LAUNCHER_PID"
POLL_S = 0.05
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 8.0
"""How long workers may take to end once asked to; then they are killed."""


class Interrupted(Exception):
    """The run was ended from outside: Ctrl-C, a closed terminal, or SIGTERM from a scheduler."""


def run_workers(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: RunFolder,
    on_step: Callable[[Step], None],
    stall_limit_s: float = 0,
) -> int:
    """Exit code of ``command``, whose output goes to the run's log; every new step is handed to ``on_step``.

    Workers end when this process is gone, even if it was killed: they know it by a variable. When they end a run that
    stands still, or processes are stopped for longer than ``stall_limit_s``, this ends those that are stopped.

    Raises Interrupted after ending all workers, and EnvironmentProblem where the log cannot be written.
    """
    try:
        log = folder.log.open("wb")
    except OSError as error:
        raise cannot_write(folder.log, error) from error
    with log, signals_as_exceptions() as signals:
        # A session of its own: Ctrl-C in a terminal reaches this process only, which then ends the workers in order.
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, LAUNCHER_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        steps = StepFollower(folder.steps)
        stopped = StoppedFamily(process, stall_limit_s)
        try:
            signals.let_through()
            while process.poll() is None:
                for step in steps.new():
                    on_step(step)
                line = stopped.line()
                if line:
                    log.write(f"{line}\n".encode())
                    log.flush()
                    end_tree(process)
                elif folder.stall.exists():
                    end_stalled(process)
                time.sleep(POLL_S)
        except BaseException:
            end_tree(process)
            raise
        for step in steps.new():
            on_step(step)
        return process.returncode


class StepFollower:
    """Reads the whole lines that were added to ``metrics.jsonl`` since the last call.

    A run that is started again gets a new file, with the steps that it keeps; they are read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.inode: int | None = None

    def new(self) -> Iterator[Step]:
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield step_from_json(line.decode())


class SignalGate:
    """Holds back the signal that ends a run until somebody is there who ends the processes it has started."""

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
        """Raises Interrupted where a signal has come already."""
        self.open = True
        if self.name:
            raise Interrupted(self.name)


@contextmanager
def signals_as_exceptions() -> Iterator[SignalGate]:
    """The first signal that ends a run raises Interrupted, once it is let through; further ones disturb nobody.

    Without that, one that comes while a process is being started would leave it behind.
    """
    gate = SignalGate()
    previous = {number: signal.signal(number, gate.take) for number in ENDING}
    try:
        yield gate
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_stalled(process: subprocess.Popen[bytes]) -> None:
    """Gives the launcher of workers that end themselves time to report; then ends what is left."""
    wait_for_stopped(process, GRACE_S)
    if process.poll() is None:
        end_tree(process)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end its workers; kills whatever is left of them after a while.

    Workers have sessions of their own, so they are found as descendants and not by process group.
    """
    known = family(process.pid)
    process.terminate()
    wait_for_stopped(process, GRACE_S)
    for pid in known | family(process.pid):
        if pid != process.pid:
            signal_process(pid, signal.SIGKILL)
    process.kill()
    process.wait()

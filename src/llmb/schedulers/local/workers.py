# SPDX-License-Identifier: Apache-2.0
"""Runs a command on this machine: starts the workers, monitors them, ends them on request."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from llmb.processes.families import end_stalled, end_tree
from llmb.processes.signals import signals_as_exceptions
from llmb.runs.folder import RunFolder, cannot_write
from llmb.runs.parent_death import PARENT_DEATH
from llmb.secrets import without_secrets

LAUNCHER_PID = "LLMB_LAUNCHER_PID"
POLL_S = 0.05


def run_workers(
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: RunFolder,
    on_time: Callable[[], None],
) -> int:
    """Exit code of ``command``, whose output goes to the run's log; ``on_time`` is called on every poll.

    Workers get no variable that may hold a secret: libraries print and record their environment.

    Workers end when this process is gone, even if it was killed: they know it by a variable, and on Linux the kernel
    kills those that are stopped. When they end a hung run, this ends those that are stopped.

    Raises Interrupted after ending all workers, and EnvironmentProblem where the log cannot be written.
    """
    try:
        log = folder.log.open("wb")
    except OSError as error:
        raise cannot_write(folder.log, error) from error
    with log, signals_as_exceptions() as signals:
        # A session of its own: Ctrl-C in a terminal reaches this process only, which then ends the workers in order.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PARENT_DEATH, str(os.getpid()), *command],
            env={**without_secrets(os.environ), **variables, LAUNCHER_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            signals.let_through()
            while process.poll() is None:
                on_time()
                if folder.stall.exists():
                    end_stalled(process)
                time.sleep(POLL_S)
        except BaseException:
            end_tree(process)
            raise
        on_time()
        return process.returncode

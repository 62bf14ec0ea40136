# SPDX-License-Identifier: Apache-2.0
"""The workers of a run on this machine: their command and variables, and running them to their end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from llmb.jobspec.spec import JobSpec, filled
from llmb.processes.families import end_stalled, started_program
from llmb.processes.ranks import words
from llmb.runs.folder import RunFolder, cannot_write
from llmb.secrets import without_secrets

THREADS = "OMP_NUM_THREADS"
"""Cores per process: without it, the thread pool of each process uses all of them."""
LAUNCHER_PID = "LLMB_LAUNCHER_PID"
POLL_S = 0.05


def local_command(spec: JobSpec, folder: RunFolder) -> tuple[str, ...]:
    """One process per GPU (or as many on a CPU), started and watched by one that does not load torch."""
    work = (filled(word, str(folder.path), sys.executable) for word in spec.work)
    return (sys.executable, *words(1, spec.placement.processes), *work)


def local_variables(spec: JobSpec, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the processes get on top of ``environ``; what the user has set stays."""
    threads = max(1, cores // spec.placement.processes_per_node)
    shipped = {THREADS: str(threads), **{item.name: item.value for item in spec.variables}}
    return {name: value for name, value in shipped.items() if name not in environ}


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
    with log:
        environ = {**without_secrets(os.environ), **variables, LAUNCHER_PID: str(os.getpid())}
        with started_program(command, log, subprocess.STDOUT, environ) as process:
            while process.poll() is None:
                on_time()
                if folder.stall.exists():
                    end_stalled(process)
                time.sleep(POLL_S)
            on_time()
        return process.returncode

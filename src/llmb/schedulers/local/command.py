# SPDX-License-Identifier: Apache-2.0
"""The command that starts a job's processes on this machine, and their variables. Pure."""

import sys
from collections.abc import Mapping

from llmb.jobspec.spec import JobSpec, filled
from llmb.processes.ranks import words
from llmb.runs.folder import RunFolder

THREADS = "OMP_NUM_THREADS"
"""Cores per process: without it, the thread pool of each process uses all of them."""


def local_command(spec: JobSpec, folder: RunFolder) -> tuple[str, ...]:
    """One process per GPU (or as many on a CPU), started and watched by one that does not load torch."""
    work = (filled(word, str(folder.path), sys.executable) for word in spec.work)
    return (sys.executable, *words(1, spec.placement.processes), *work)


def local_variables(spec: JobSpec, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the processes get on top of ``environ``; what the user has set stays."""
    threads = max(1, cores // spec.placement.processes_per_node)
    shipped = {THREADS: str(threads), **{item.name: item.value for item in spec.variables}}
    return {name: value for name, value in shipped.items() if name not in environ}

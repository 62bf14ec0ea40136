# SPDX-License-Identifier: Apache-2.0
"""Runs the program that measures, in a separate process, so that the caller never loads torch."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from llmb.base.errors import EnvironmentProblem, pip_install
from llmb.base.processes import run_talking
from llmb.base.scratch import scratch_folder
from llmb.catalogue.records import Record
from llmb.launch.programs.engine.program import shipped_variables
from llmb.launch.ranks import words
from llmb.nodes.bench.protocol import TIMING_PROGRAM, BenchProgress, CaseList, Timings
from llmb.readers.samples.host import Device

OnProgress = Callable[[BenchProgress], None]


def run_measurements(job: CaseList, on_progress: OnProgress) -> Timings:
    """Run the measurements. Raises as ``run_program``."""
    with job_folder("job.json", job) as folder:
        job_file, answered = folder / "job.json", folder / "timings.json"
        run_program(("-P", "-m", TIMING_PROGRAM, str(job_file), str(answered)), job.device, "", on_progress)
        return Timings.model_validate_json(answered.read_text())


@contextmanager
def job_folder(name: str, job: Record) -> Iterator[Path]:
    """Yield a temporary folder for a program's input and output files."""
    with scratch_folder("llmb-bench-") as folder:
        (folder / name).write_text(job.model_dump_json())
        yield folder


def run_ranks(program: str, folder: Path, ranks: int, device: Device, what: str, on_progress: OnProgress) -> None:
    """Run ranks on this machine, which read their job in ``folder`` and write results. Raises as ``run_program``."""
    command = (*words(1, ranks), sys.executable, "-P", "-m", program, str(folder))
    run_program(command, device, f" {what}", on_progress, {"OMP_NUM_THREADS": "1"})


def run_program(
    program: Sequence[str],
    device: Device,
    what: str,
    on_progress: OnProgress,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run an interpreter with ``program``; the caller's variables are overridden by those of a run, then ``variables``.

    Raises EnvironmentProblem without torch, RunFailed if the program died, with what it was measuring, or
    UserInterrupt.
    """
    if find_spec("torch") is None:
        raise EnvironmentProblem("measuring requires torch, which this Python does not have", do=pip_install("engine"))
    last: BenchProgress | None = None

    def follow(line: bytes) -> None:
        nonlocal last
        if line.startswith(b"{"):  # libraries print to standard output, too
            last = BenchProgress.model_validate_json(line)
            on_progress(last)

    # As a run's workers have them, so that figures can be compared with those of runs.
    environ = {**shipped_variables(device, os.environ), **variables, **os.environ}
    ended = run_talking(tuple(program), environ, follow, "nothing was kept")
    if ended.code:
        where = f", while measuring {last.name}," if last else ""
        raise ended.failure(f"the program that measures{what}{where}")

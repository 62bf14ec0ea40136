# SPDX-License-Identifier: Apache-2.0
"""Runs the programs that measure as separate processes, so that the caller does not load torch."""

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
from llmb.launch.jobspec.job_options import Binding
from llmb.launch.programs.engine.program import shipped_variables
from llmb.launch.ranks import bind_words, words
from llmb.nodes.bench.protocol import TIMING_PROGRAM, BenchProgress, CaseList, Timings
from llmb.readers.samples.host import Device

OnProgress = Callable[[BenchProgress], None]


def run_measurements(job: CaseList, on_progress: OnProgress) -> Timings:
    """Time the cases of ``job`` in a separate process; raises the same errors as ``run_program``."""
    with job_folder("job.json", job) as folder:
        job_file, answered = folder / "job.json", folder / "timings.json"
        run_program(("-P", "-m", TIMING_PROGRAM, str(job_file), str(answered)), job.device, "", on_progress)
        return Timings.model_validate_json(answered.read_text())


@contextmanager
def job_folder(name: str, job: Record) -> Iterator[Path]:
    """Yield a temporary folder that contains ``job`` as a file, for a program's input and output."""
    with scratch_folder("llmb-bench-") as folder:
        (folder / name).write_text(job.model_dump_json())
        yield folder


def run_ranks(program: str, folder: Path, ranks: int, device: Device, what: str, on_progress: OnProgress) -> None:
    """Run ranks that read their job from ``folder`` and write results there; raise the errors of ``run_program``."""
    bound = bind_words(Binding().arguments(gpus=device == "cuda", workers=ranks))
    command = (*words(1, ranks), *bound, sys.executable, "-P", "-m", program, str(folder))
    run_program(command, device, f" {what}", on_progress, {"OMP_NUM_THREADS": "1"})


def run_program(
    program: Sequence[str],
    device: Device,
    what: str,
    on_progress: OnProgress,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run Python with the arguments ``program``; set a run's variables and ``variables`` unless they are already set.

    Raises EnvironmentProblem if torch is missing, RunFailed with the current case if the program fails, UserInterrupt
    on a signal.
    """
    if find_spec("torch") is None:
        raise EnvironmentProblem("measuring requires torch, which this Python does not have", do=pip_install("engine"))
    last: BenchProgress | None = None

    def follow(line: bytes) -> None:
        nonlocal last
        if line.startswith(b"{"):  # libraries also print to stdout
            last = BenchProgress.model_validate_json(line)
            on_progress(last)

    # The same variables as for a run's workers, so that measurements are comparable with runs.
    environ = {**shipped_variables(device, os.environ), **variables, **os.environ}
    ended = run_talking(tuple(program), environ, follow, "nothing was saved")
    if ended.code:
        where = f", while measuring {last.name}," if last else ""
        raise ended.failure(f"the program that measures{what}{where}")

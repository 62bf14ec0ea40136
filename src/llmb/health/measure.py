# SPDX-License-Identifier: Apache-2.0
"""Runs the program that measures, in a process of its own: whoever asks for measurements never loads torch."""

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.microbenchmarks.jobs import PROGRAM, Job, Progress, Timings
from llmb.processes.talking import run_talking
from llmb.programs.engine.worker_variables import shipped_variables

OnProgress = Callable[[Progress], None]


def need_torch() -> None:
    """Raises EnvironmentProblem."""
    if find_spec("torch") is None:
        raise EnvironmentProblem(
            "measuring needs torch, which this Python does not have", do="pip install 'llmb[engine]'"
        )


def run_measurements(job: Job, on_progress: OnProgress) -> Timings:
    """Raises EnvironmentProblem without torch, RunFailed if the program died, with what it was measuring, or
    UserInterrupt."""
    need_torch()
    last: Progress | None = None

    def follow(line: bytes) -> None:
        nonlocal last
        last = Progress.model_validate_json(line)
        on_progress(last)

    with tempfile.TemporaryDirectory(prefix="llmb-bench-") as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "timings.json"
        asked.write_text(job.model_dump_json())
        # As a run's workers have them, so that figures can be compared with those of runs.
        variables = {**shipped_variables(job.device, os.environ), **os.environ}
        ended = run_talking(("-m", PROGRAM, str(asked), str(answered)), variables, follow, "nothing was kept")
        if ended.code:
            where = f", while measuring {last.name}" if last else ""
            raise ended.failure(f"the program that measures{where},")
        return Timings.model_validate_json(answered.read_text())

# SPDX-License-Identifier: Apache-2.0
"""The last command of a job's script: ``python -m llmb.jobs.finish RUN_FOLDER EXIT_CODE SIGNAL``.

It writes the result of the job's run after the workers have ended; SIGNAL is empty if there was none.
"""

import sys
from pathlib import Path

from llmb.launch.jobspec.spec import read_spec
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.port import End
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record
from llmb.runs.result import Result


def finish_job(folder: RunFolder, exit_code: int, signal: str = "") -> Result:
    """Write and return the result of a run whose workers have ended; ``signal`` is empty if there was none."""
    spec = read_spec(folder)
    cause = find_scheduler(spec.scheduler).cause(signal) if signal else None
    return finish_run(folder, read_record(folder), End(exit_code, cause), spec)


if __name__ == "__main__":
    finish_job(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

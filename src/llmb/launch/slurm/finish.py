# SPDX-License-Identifier: Apache-2.0
"""What a batch script calls when the workers ended, with ``RUN_FOLDER EXIT_CODE SIGNAL``; no signal is empty."""

import sys
from pathlib import Path

from llmb.launch.nsys import export_report
from llmb.runs.finish import finish, finish_from_outside
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record
from llmb.runs.result import Result

CAUSES = {"TERM": "Slurm (TERM: cancelled, preempted, or out of time)", "USR1": "the near end of its time limit"}


def finish_job(folder: RunFolder, exit_code: int, signal: str = "") -> Result:
    """Writes the result of a job whose workers ended; the empty signal is none."""
    record = read_record(folder)
    failure = export_report(record.plan, folder)
    if signal:
        return finish_from_outside(folder, record, exit_code, CAUSES.get(signal, signal), failure)
    return finish(folder, record, exit_code, None, failure)


if __name__ == "__main__":
    finish_job(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

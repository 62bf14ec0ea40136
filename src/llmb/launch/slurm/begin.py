# SPDX-License-Identifier: Apache-2.0
"""What a batch script calls before the workers start: ``python -m llmb.launch.slurm.begin RUN_FOLDER``."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from llmb.runs.folder import RunFolder
from llmb.runs.record import Job, now, read_record, write_record


def begin(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Writes down that the run has begun, in which job and on which nodes."""
    job = Job(
        job_id=environ["SLURM_JOB_ID"],
        nodes=environ["SLURM_JOB_NODELIST"],
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )
    # Of an attempt before this one nothing is left but its log.
    fresh = {"reason": None, "exit_code": None, "ended_at": None, "environment": None, "result": None}
    began = {"status": "running", "started_at": now(), "job": job}
    write_record(folder, read_record(folder).model_copy(update=fresh | began))
    folder.job_end.unlink(missing_ok=True)


if __name__ == "__main__":
    begin(RunFolder(Path(sys.argv[1])), os.environ)

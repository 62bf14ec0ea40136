# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb.bench.worker JOB_FILE RESULT_FILE``."""

import os
import sys
from pathlib import Path

from llmb.bench.jobs import BenchProgress, CaseList
from llmb.bench.worker.run import run_job


def say(progress: BenchProgress) -> None:
    sys.stdout.write(progress.model_dump_json() + "\n")
    sys.stdout.flush()


def main() -> None:
    job = CaseList.model_validate_json(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(run_job(job, say).model_dump_json())
    sys.stdout.flush()
    os._exit(0)  # torch's threads can abort a finished program while the interpreter shuts down


if __name__ == "__main__":
    main()

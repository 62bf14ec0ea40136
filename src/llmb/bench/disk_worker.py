# SPDX-License-Identifier: Apache-2.0
"""The program that measures a file system: ``python -m llmb.bench.disk_worker JOB_FILE RESULT_FILE``."""

import sys
from pathlib import Path

from llmb.bench.disk import DiskJob
from llmb.bench.disk_files import run
from llmb.bench.jobs import BenchProgress


def main() -> None:
    job = DiskJob.model_validate_json(Path(sys.argv[1]).read_text())

    def say(progress: BenchProgress) -> None:
        sys.stdout.write(progress.model_dump_json() + "\n")
        sys.stdout.flush()

    try:
        timing = run(job, say)
    except RuntimeError as error:
        sys.exit(str(error))
    Path(sys.argv[2]).write_text(timing.model_dump_json())


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What is started once per rank of a run under Nsight Systems; it becomes the worker, with or without ``nsys``.

``python -m llmb.programs.engine.profiled_worker RUN_FOLDER``
"""

import os
import platform
import shutil
import sys
from pathlib import Path

from llmb.programs.engine.nsys import nsys_command
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record

WORKER, PROFILED_WORKER = "llmb.engine.worker", "llmb.programs.engine.profiled_worker"


def worker_module(plan: Plan) -> str:
    """What is started once per rank."""
    return PROFILED_WORKER if plan.profile and plan.profile.profiler == "nsys" else WORKER


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    worker = (sys.executable, "-P", "-m", WORKER, str(folder.path))
    plan, rank = read_record(folder).plan, int(os.environ["RANK"])
    if plan.profile and plan.profile.reason and rank == 0:
        sys.stdout.write(f"llmb: {plan.profile.reason}\n")
        sys.stdout.flush()
    command = (*nsys_command(plan, folder, rank, os.environ), *worker)
    if command != worker and shutil.which(command[0]) is None:
        sys.stdout.write(f"llmb: rank {rank} is not profiled: '{command[0]}' is not on the PATH of {platform.node()}\n")
        sys.stdout.flush()
        command = worker
    if command != worker:
        folder.nsys_profile.mkdir(exist_ok=True)
    os.execvp(command[0], command)  # noqa: S606 (a list, never a shell)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The first program of an externally started rank: it gets the folder from rank 0, and becomes the worker.

The worker's command line names the folder, by which samples distinguish the run's own processes from others.
"""

import os
import sys

from llmb.base.errors import EnvironmentProblem
from llmb.engine.parallel.rendezvous import announced_folder

if __name__ == "__main__":
    try:
        folder, variables = announced_folder()
    except EnvironmentProblem as error:
        sys.exit(error.text())
    os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
    os.execv(sys.executable, [sys.executable, "-P", "-m", "llmb.engine.worker", str(folder)])  # noqa: S606 (no words of users)

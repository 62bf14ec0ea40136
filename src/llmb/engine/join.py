# SPDX-License-Identifier: Apache-2.0
"""Runs the worker of a rank other than 0 under another launcher, with rank 0's folder and variables."""

import os
import sys

from llmb.base.errors import EnvironmentProblem
from llmb.engine.parallel.rendezvous import announced_folder

if __name__ == "__main__":
    try:
        folder, variables, binds = announced_folder()
    except EnvironmentProblem as error:
        sys.exit(error.text())
    os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
    bind_words = sys.argv[1:] if binds else []
    os.execv(sys.executable, [*bind_words, sys.executable, "-P", "-m", "llmb.engine.worker", str(folder)])  # noqa: S606 (no words of users)

# SPDX-License-Identifier: Apache-2.0
"""The worker in a process that was forked where torch is loaded already; ``variables`` and ``folder`` are given."""

import os
import sys
from pathlib import Path

from llmb.engine.worker import main

os.environ.update(globals()["variables"])
sys.argv = ["worker", globals()["folder"]]
with Path(os.devnull).open("wb") as nowhere:
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
main()

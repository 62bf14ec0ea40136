# SPDX-License-Identifier: Apache-2.0
"""The worker, on a disk that takes SLOWER_S seconds longer for every checkpoint, and until the next one is due."""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmb.engine.checkpoint import save as save_module
from llmb.engine.worker import main
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

FOLDER = RunFolder(Path(sys.argv[1]))
PLAN = read_record(FOLDER).plan
SAVES = itertools.count(1)
LONGEST_S = 120
write = save_module._write_pieces


def steps_done() -> int:
    return FOLDER.steps.read_text().count("\n") if FOLDER.steps.exists() else 0


def slow_write(*arguments: Any, **options: Any) -> Any:
    began = time.monotonic()
    awaited = min((next(SAVES) + 1) * (PLAN.checkpoint_interval or PLAN.steps), PLAN.steps)
    time.sleep(float(os.environ["SLOWER_S"]))
    while steps_done() < awaited:
        assert time.monotonic() - began < LONGEST_S, "the next steps wait for this save"
        time.sleep(0.05)
    return write(*arguments, **options)


save_module._write_pieces = slow_write
main()

# SPDX-License-Identifier: Apache-2.0
"""The worker, whose rank 1 does something odd in step 3, or at the end: what, the variable ODD says."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from llmb.engine.data.batches import Loader, StepData
from llmb.engine.worker import main
from llmb.runs.folder import RunFolder

usual = Loader.step
STEPS = RunFolder(Path(sys.argv[1])).steps
LONGEST_S = 120


def sleep() -> None:
    time.sleep(3600)


def fail() -> None:
    raise ValueError("an odd shape")


def leave() -> None:
    os._exit(3)


IN_STEP = {"sleep": sleep, "fail": fail, "leave": leave}
ODD = os.environ["ODD"]


def wait_for_steps(count: int) -> None:
    """Rank 0 may still have to write the last step: it is ended as soon as this rank has left."""
    end = time.monotonic() + LONGEST_S
    while STEPS.read_text().count("\n") < count:
        assert time.monotonic() < end, "rank 0 has not written its steps"
        time.sleep(0.01)


def odd_step(loader: Loader, number: int) -> StepData:
    if ODD in IN_STEP and number == 3 and os.environ["RANK"] == "1":
        wait_for_steps(number)
        IN_STEP[ODD]()
    return usual(loader, number)


Loader.step = odd_step
if ODD == "linger":
    dist.destroy_process_group = sleep
main()

# SPDX-License-Identifier: Apache-2.0
"""The worker, whose rank 1 does something odd in step 3, or at the end: what, the variable ODD says."""

import os
import time

import torch.distributed as dist

from llmb.engine.data.steps import Loader, StepData
from llmb.engine.worker import main

usual = Loader.step


def sleep() -> None:
    time.sleep(3600)


def fail() -> None:
    raise ValueError("an odd shape")


def leave() -> None:
    os._exit(3)


IN_STEP = {"sleep": sleep, "fail": fail, "leave": leave}
ODD = os.environ["ODD"]


def odd_step(loader: Loader, number: int) -> StepData:
    if ODD in IN_STEP and number == 3 and os.environ["RANK"] == "1":
        IN_STEP[ODD]()
    return usual(loader, number)


Loader.step = odd_step
if ODD == "linger":
    dist.destroy_process_group = sleep
main()

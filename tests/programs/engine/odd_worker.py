# SPDX-License-Identifier: Apache-2.0
"""The worker, whose rank 1 does something odd in step 3, or at the end: what, the variable ODD says."""

import os
import time
from typing import Any

import torch.distributed as dist

from llmb.engine import loop
from llmb.engine.worker import main

usual = loop.micro_batches


def sleep() -> None:
    time.sleep(3600)


def fail() -> None:
    raise ValueError("an odd shape")


def leave() -> None:
    os._exit(3)


IN_STEP = {"sleep": sleep, "fail": fail, "leave": leave}
ODD = os.environ["ODD"]


def odd_micro_batches(data: Any, layout: Any, first_sample: int, *others: Any) -> Any:
    if ODD in IN_STEP and first_sample == 3 * layout.gbs and os.environ["RANK"] == "1":
        IN_STEP[ODD]()
    return usual(data, layout, first_sample, *others)


loop.micro_batches = odd_micro_batches
if ODD == "linger":
    dist.destroy_process_group = sleep
main()

# SPDX-License-Identifier: Apache-2.0
"""One rank of a plan that loads for longer than the others, and than torch's own limit, made short here; then sums.

Arguments: folder with plan.json, rank. Prints JSON: seconds of loading, and the limits of all groups in seconds.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import CPU, plan_in, run
from torch.distributed import distributed_c10d

from llmb.engine.loop import load_start
from llmb.engine.parallel.mesh import join_ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import prepare_stages
from llmb.engine.watchdog import Progress
from llmb.runs.folder import RunFolder

TORCH_LIMIT_S, LOAD_S = 3, 6


def main(folder: Path, rank: int) -> None:
    plan = plan_in(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LLMB_STORE": str(folder / "store")}
    ranks = join_ranks(plan)
    stages = prepare_stages(plan, ranks)
    distributed_c10d.default_pg_timeout = timedelta(seconds=TORCH_LIMIT_S)
    build_passes(stages, plan, ranks)
    load_start(plan, RunFolder(folder), stages, [], ranks, Progress(0))
    if rank == 1:
        time.sleep(LOAD_S)
    groups = [group for group in distributed_c10d._world.pg_map if group.size() == 2]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    limits = [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]
    print(json.dumps(limits))


run(main)

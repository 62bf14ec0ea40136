# SPDX-License-Identifier: Apache-2.0
"""One rank of a plan: makes all process groups that its training needs, and counts their threads and the devices'.

Arguments: folder with plan.json and room for the rendezvous, rank. Prints JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from llmb.engine.checkpoint.save import Saver
from llmb.engine.loop import prepare_stages
from llmb.engine.parallel.gloo import gloo_backend
from llmb.engine.parallel.mesh import arrange
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan

CPU = torch.device("cpu")


def gloo_threads() -> dict[str, int]:
    """Of each process group, by its name and description."""
    backends: dict[str, Any] = {
        f"{group.group_name} {group.group_desc}": group._get_backend(CPU) for group in _world.pg_map
    }
    return {name: backend.options._threads for name, backend in backends.items()}


def device_threads() -> int:
    """Of this process."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def main(folder: Path, rank: int) -> None:
    plan = EnginePlan.model_validate_json((folder / "plan.json").read_text())
    layout = plan.recipe.layout
    store = f"file://{folder}/store"
    dist.init_process_group(gloo_backend(), rank=rank, world_size=layout.gpus, init_method=store)
    ranks = arrange(rank, CPU, layout, plan.parallelism.replicas(layout))
    stages = prepare_stages(plan, ranks)
    Saver(plan, RunFolder(folder / "run"), ranks, stages, [])
    print(json.dumps({"groups": gloo_threads(), "devices": device_threads()}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


main(Path(sys.argv[1]), int(sys.argv[2]))

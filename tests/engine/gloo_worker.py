# SPDX-License-Identifier: Apache-2.0
"""One rank of a plan: makes all process groups that its training needs, and counts their threads and the devices'.

Arguments: folder with plan.json and room for the rendezvous, rank. Prints JSON.
"""

import json
from pathlib import Path
from typing import Any

from ranks import CPU, joined, plan_in, ranks_of, run
from torch.distributed.distributed_c10d import _world

from llmb.engine.checkpoint.save import Saver
from llmb.engine.optimizer import build_optimizer
from llmb.engine.stages import prepare_stages
from llmb.runs.folder import RunFolder


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
    plan = plan_in(folder)
    with joined(folder, rank, plan.recipe.layout.gpus):
        ranks = ranks_of(plan, rank)
        stages = prepare_stages(plan, ranks)
        optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
        saver = Saver(plan, RunFolder(folder / "run"), ranks, stages, optimizers)
        print(json.dumps({"groups": gloo_threads(), "devices": device_threads(), "writes": len(saver.pieces.items)}))


run(main)

# SPDX-License-Identifier: Apache-2.0
"""One rank, the only one of its node, that tries a folder for checkpoints of its own.

Arguments: folder with plan.json and room for the rendezvous, folders of the ranks by comma, rank. Prints the error.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llmb.engine.checkpoint.save import check_shared_folder
from llmb.engine.parallel.gloo import Hosts, gloo_backend
from llmb.engine.parallel.mesh import Ranks
from llmb.errors import EnvironmentProblem
from llmb.runs.plan import EnginePlan


def main(place: Path, folders: list[Path], rank: int) -> None:
    os.environ["LOCAL_RANK"] = "0"
    world_size = len(folders)
    dist.init_process_group(gloo_backend(), init_method=f"file://{place}/store", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    ranks = Ranks(rank, world_size, torch.device("cpu"), mesh, fsdp=mesh, expert_mesh=mesh, expert_fsdp=mesh)
    plan = EnginePlan.model_validate_json((place / "plan.json").read_text())
    try:
        check_shared_folder(plan, folders[rank], ranks, Hosts(rank, world_size, 1, "checkpoint"))
    except EnvironmentProblem as error:
        sys.stdout.write(str(error))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2].split(",")], int(sys.argv[3]))

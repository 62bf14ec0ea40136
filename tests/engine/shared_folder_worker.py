# SPDX-License-Identifier: Apache-2.0
"""One rank, the only one of its node, that tries a folder for checkpoints of its own.

Arguments: folder with plan.json and room for the rendezvous, folders of the ranks by comma, rank. Prints the error.
"""

import os
import sys
from pathlib import Path

from ranks import CPU, joined, plan_in, run
from torch.distributed.device_mesh import init_device_mesh

from llmb.base.errors import EnvironmentProblem
from llmb.engine.checkpoint.save import check_shared_folder
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.rendezvous import Hosts


def main(place: Path, folders: str, rank: int) -> None:
    os.environ["LOCAL_RANK"] = "0"
    own = [Path(name) for name in folders.split(",")]
    with joined(place, rank, len(own)):
        mesh = init_device_mesh("cpu", (len(own),), mesh_dim_names=("dp",))
        ranks = Ranks(rank, len(own), CPU, mesh, fsdp=mesh, expert_mesh=mesh, expert_fsdp=mesh)
        try:
            check_shared_folder(plan_in(place), own[rank], ranks, Hosts(rank, len(own), 1, "checkpoint"))
        except EnvironmentProblem as error:
            sys.stdout.write(str(error))


run(main)

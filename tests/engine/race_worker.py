# SPDX-License-Identifier: Apache-2.0
"""One of two ranks that gather and reduce-scatter in turn, as tensor parallelism with sequence parallelism does.

Arguments: folder for the rendezvous, rank, seconds, "torch" for torch's own gloo or "llmb" for ours.
Two threads of ProcessGroupGloo assign one string, ``lastCompletedWorkName``, after its mutex is released.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

from llmb.engine.parallel.rendezvous import gloo_backend

RANKS, AT_ONCE = 2, 200


def main(folder: str, rank: str, seconds: str, whose: str) -> None:
    backend = gloo_backend() if whose == "llmb" else "gloo"
    store = dist.FileStore(str(Path(folder) / "rendezvous"), RANKS)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=RANKS)
    group, end = dist.group.WORLD, time.monotonic() + float(seconds)
    assert group is not None
    going = torch.ones(1)
    while going.item():
        for _ in range(AT_ONCE):
            gathered = all_gather_tensor(torch.ones(4), 0, group)
            assert gathered.sum() == 4 * RANKS
            assert reduce_scatter_tensor(gathered, "sum", 0, group).sum() == 4 * RANKS
        going.fill_(float(time.monotonic() < end))
        dist.broadcast(going, 0)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself, which is not the race


if __name__ == "__main__":
    main(*sys.argv[1:])

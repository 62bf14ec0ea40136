# SPDX-License-Identifier: Apache-2.0
"""One rank that joins another on another node, and sums with it. Prints the sum and where its sockets listen."""

import json
import os
import sys

import torch
import torch.distributed as dist
from ranks import CPU, run

from llmb.engine.parallel.mesh import connect_ranks
from llmb.engine.parallel.rendezvous import route_address


def main(rank: int) -> None:
    connect_ranks(CPU)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.barrier()
    found = {"rank": rank, "total": int(total), "address": route_address(os.environ)}
    sys.stdout.write(json.dumps(found) + "\n")  # as one piece, because both ranks write to one pipe


run(main)

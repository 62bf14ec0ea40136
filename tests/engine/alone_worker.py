# SPDX-License-Identifier: Apache-2.0
"""What rank 1 of 4 gets from collectives where the others are not there. Prints values as JSON."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.engine.parallel.alone import stand_in

stand_in("cpu")
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
name = dist.distributed_c10d._get_default_group().group_name
c10d = torch.ops._c10d_functional
own = torch.tensor([1.0, 2.0])
received, votes = torch.full((1000,), torch.nan, requires_grad=True), torch.zeros(1, dtype=torch.int32)
for tensor in (received, votes):
    dist.irecv(tensor, 0).wait()
in_place = torch.zeros(8)
in_place[2:4] = own
c10d.wait_tensor(c10d.all_gather_into_tensor_out(in_place[2:4], 4, name, out=in_place))
apart = torch.zeros(8)
c10d.wait_tensor(c10d.all_gather_into_tensor_out(own, 4, name, out=apart))
rows = torch.arange(4.0)
found = {
    "received": received.tolist(),
    "votes": votes.tolist(),
    "gathered in place": in_place.tolist(),
    "gathered apart": apart.tolist(),
    "gathered": c10d.wait_tensor(c10d.all_gather_into_tensor(own, 4, name)).tolist(),
    "exchanged": c10d.wait_tensor(c10d.all_to_all_single(rows, [1] * 4, [1] * 4, name)).tolist(),
    "more received": c10d.wait_tensor(c10d.all_to_all_single(rows, [2, 1, 1, 1], [1] * 4, name)).tolist(),
    "fewer received": c10d.wait_tensor(c10d.all_to_all_single(rows, [0, 1, 1, 1], [1] * 4, name)).tolist(),
    "scattered": c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.arange(8.0), "sum", 4, name)).tolist(),
    "reduced": c10d.wait_tensor(c10d.all_reduce(own, "sum", name)).tolist(),
}
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)

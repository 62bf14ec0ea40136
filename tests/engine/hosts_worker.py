# SPDX-License-Identifier: Apache-2.0
"""One rank that joins others, sends its heartbeat, exchanges values, saves, and leaves, as beside NCCL, for which a
group that does nothing stands in.

Arguments: folder with plan.json, port of the store, ranks of a node, rank. Prints JSON: connections of the process by
what they are for, and seconds since its start.
"""

import errno
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import plan_in, ranks_of, run
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

from llmb.engine.checkpoint.save import Saver
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.rendezvous import Hosts, host_store
from llmb.engine.stages import prepare_stages
from llmb.engine.watchdog import Heartbeats
from llmb.runs.folder import RunFolder


def connections(port: str) -> dict[str, int]:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    own = {str(link.readlink())[8:-1] for link in links if str(link.readlink()).startswith("socket:")}
    tables = [Path("/proc/self/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    ends = [row[1:3] for row in rows if row[3] == "01" and row[9] in own]  # 01 is established
    store = sum(f"{int(port):04X}" in (end.rpartition(":")[2] for end in both) for both in ends)
    return {"store": store, "hosts": len(ends) - store}


def beat(heartbeats: Heartbeats) -> None:
    """Returns when the first rank has heard all."""
    heartbeats.beat = "1"
    heartbeats.reading = heartbeats.rank == 0
    heartbeats.start(connect_within_s=300)
    while heartbeats.rank == 0 and not all(heard.text for heard in heartbeats.heard.values()):
        time.sleep(0.05)
    heartbeats.to_publish = "all heard" if heartbeats.rank == 0 else None
    while not heartbeats.verdict:
        time.sleep(0.05)


def exchange(hosts: Hosts) -> None:
    rank, ranks = hosts.rank, hosts.world_size
    for number in range(2):
        gathered = hosts.all_gather(torch.tensor([rank, number], dtype=torch.float64))
        assert gathered.tolist() == [[other, number] for other in range(ranks)]
    assert hosts.ask(lambda: rank, lambda given: [2 * value for value in given]) == 2 * rank
    try:
        hosts.ask(lambda: fail_on_last(rank, ranks), list)
    except OSError as error:
        assert f"rank {ranks - 1}: " in str(error)
    else:
        raise AssertionError("the error of one rank is not that of all")


def fail_on_last(rank: int, ranks: int) -> None:
    if rank == ranks - 1:
        raise OSError(errno.ENOSPC, "full")


def main(folder: Path, port: str, per_node: int, rank: int) -> None:
    began = time.monotonic()
    plan = plan_in(folder)
    layout = plan.recipe.layout
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.gpus),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    took_s = {}
    store = host_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.gpus)
    beat(Heartbeats(rank, layout.gpus, interval_s=0.2))
    took_s["heartbeats"] = time.monotonic() - began
    exchange(Hosts(rank, layout.gpus, per_node, "figures"))
    took_s["figures"] = time.monotonic() - began
    ranks = ranks_of(plan, rank, experts=False)
    stages = prepare_stages(plan, ranks)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    saver = Saver(plan, RunFolder(folder), ranks, stages, optimizers)
    for step in (0, 1):
        saver.after_step(step)
    took_s["saved"] = time.monotonic() - began
    print(json.dumps({"connections": connections(port), "seconds": took_s}), flush=True)
    store.add("done", 1)
    while store.add("done", 0) < layout.gpus:  # a connection that is closed is not counted
        time.sleep(0.05)
    time.sleep(0.5 * (rank == 0))  # the others ask it


run(main)

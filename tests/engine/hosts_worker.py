# SPDX-License-Identifier: Apache-2.0
"""One rank that gathers values with the hosts of others, as beside NCCL, for which a group that does nothing stands in.

Arguments: folder with room for the rendezvous, ranks, ranks of a node, rank. Prints the number of connections.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

from llmb.engine.parallel.gloo import Hosts


def connections() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    own = {str(link.readlink())[8:-1] for link in links if str(link.readlink()).startswith("socket:")}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in own for row in rows)  # 01 is established


def main(folder: Path, ranks: int, per_node: int, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), -1)
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    hosts = Hosts(rank, ranks, per_node)
    for number in range(2):
        gathered = hosts.all_gather(torch.tensor([rank, number], dtype=torch.float64))
        assert gathered.tolist() == [[other, number] for other in range(ranks)]
    print(connections(), flush=True)
    store.add("done", 1)
    while store.add("done", 0) < ranks:  # a connection that is closed is not counted
        time.sleep(0.05)
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


main(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))

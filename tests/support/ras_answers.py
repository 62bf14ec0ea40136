# SPDX-License-Identifier: Apache-2.0
"""Answers of NCCL's RAS, in the forms of its versions; as ``src/ras/client_support.cc`` prints them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = """NCCL version {version} compiled with CUDA 12.8
CUDA runtime version 12080, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
{groups}

Errors
======

{errors}Warnings
========

{warnings}"""
WORLD = "    0         1         2         4         8         8   RUNNING  {}"
PAIRS = "    1         4         1         2         2         8   RUNNING  {}"
RANK_3 = "GPU 3 managed by process 4103 on node 10.0.0.1"


def text(version: str, errors: str = "", warnings: str = "", *, groups: Sequence[str] = (WORLD.format("OK"),)) -> str:
    return HEAD.format(version=version, groups="\n".join(groups), errors=errors, warnings=warnings)


BEHIND = f"""#0-0 (00c0ffee00c0ffee) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 41
  Rank 3 has launched up to operation 40 -- {RANK_3}

"""
BEHIND_2_24 = f"""#0-0 (00c0ffee00c0ffee) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 120
  Rank 3 has launched up to operation 118 -- {RANK_3}

"""
AHEAD = """#0-0 (00c0ffee00c0ffee) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have not launched any operations
  2 ranks have launched up to operation 1
  Rank 0 -- GPU 0 managed by process 4100 on node 10.0.0.1
  Rank 1 -- GPU 1 (NVML 5) managed by process 4101 on node 10.0.0.1

"""
STATES = """#0-0 (00c0ffee00c0ffee) MISMATCH
  Communicator ranks have different status
  6 ranks have status RUNNING
  Rank 2 has status ABORT -- GPU 2 managed by process 4102 on node 10.0.0.1
  Rank 7 has status NOCOMM -- [process information not found]

"""
UNKNOWN_2_24 = """#0-0 (00c0ffee00c0ffee) MISMATCH
  Communicator ranks have different status
  6 ranks have status RUNNING
  2 ranks have status UNKNOWN
  The unknown ranks: 3,7

"""
FAILED = """#0-0 (00c0ffee00c0ffee) ERROR
  Asynchronous errors on 3 ranks
  2 ranks reported Remote process error
  Rank 0 -- GPU 0 managed by process 4100 on node 10.0.0.1
  Rank 5 -- GPU 1 managed by process 5101 on node 10.0.0.2
  Rank 6 reported System error -- GPU 2 managed by process 5102 on node 10.0.0.2

"""
SILENT = """INCOMPLETE
  Missing communicator data from 1 job process
  Process 5102 on node 10.0.0.2 managing GPU 2

#0-0 (00c0ffee00c0ffee) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 6 -- GPU 2 managed by process 5102 on node 10.0.0.2

"""
DEAD = SILENT.replace("INCOMPLETE\n  Missing communicator data from 1 job process", "DEAD\n  1 job process is considered dead (unreachable via the RAS network)", 1)  # fmt: skip # noqa: E501
DEAD_2_24 = """DEAD
  2 job processes are considered dead (unreachable via the RAS network)
  Process 5102 on node 10.0.0.2 managing GPU 2
  Process 5103 on node 10.0.0.2 managing GPUs 3,4 (NVML 5,6)

#0-0 (00c0ffee00c0ffee) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 6,7

"""
LATE = """TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""


def ras_rank(number: int, node: int = 0, *, pid: int | None = None, counts: Mapping[str, int], **status: Any) -> Any:
    """As JSON has it; ``number`` is also the GPU."""
    flags = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": f"10.0.0.{node + 1}",
        "pid": 4100 + number if pid is None else pid,
        "cuda_dev": number % 4,
        "nvml_dev": number % 4,
        "status": {**flags, **status},
        "collective_counts": {"Broadcast": 2, **counts},
    }


def missing(number: int, *, unresponsive: bool = True, dead: bool = False) -> Any:
    found = ras_rank(number, counts={})
    del found["collective_counts"]
    return {**found, "status": {"unresponsive": unresponsive, "considered_dead": dead}}


def communicator(name: str, ranks: Sequence[Any], missing_ranks: Sequence[Any] = ()) -> Any:
    return {
        "hash": f"0x{name}",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(missing_ranks),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing_ranks),
        "ranks": list(ranks),
        "missing_ranks": list(missing_ranks),
    }


FINE_RANKS = [ras_rank(number, number // 4, counts={"AllReduce": 41}) for number in range(8)]


def answer(*communicators: Any, version: str = "2.29.2", timeouts: int = 0) -> bytes:
    """With the comma that NCCL 2.28 leaves out left out."""
    document = {
        "nccl_version": version,
        "cuda_runtime_version": 12080,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-27 01:00:00",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.004, "timeouts_count": timeouts},
    }
    written = json.dumps(document, indent=2)
    if version.startswith("2.28"):
        for number in range(8):
            end = f'"nvml_dev": {number},\n          "status": {{\n            "unresponsive"'
            written = written.replace(end, end.replace(",\n", "\n", 1))
    return written.encode()

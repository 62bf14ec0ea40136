# SPDX-License-Identifier: Apache-2.0
"""Lines as NCCL's Inspector writes them, in the form of its two versions."""

import json


def inspector_line(
    rank: int,
    number: int,
    time_us: int,
    *,
    operation: str = "AllReduce",
    ranks: int = 4,
    communicator: str = "0xc0ffee",
    version: str = "v5.0",
) -> str:
    performance = {
        "coll": operation,
        "coll_sn": number,
        "coll_msg_size_bytes": 1 << 20,
        "coll_exec_time_us": time_us,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 5.25,
        "coll_busbw_gbs": 9.5,
        **({"graphCaptured": False} if version == "v5.0" else {}),
    }
    form = {"inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "nccl_profiler_interface"}
    where = {"dump_timestamp_us": 1_800_000_000_000_000, "hostname": f"node{7 + rank // 2}", "pid": 4100 + rank}
    document = {
        "header": {"id": communicator, "rank": rank, "n_ranks": ranks, "nnodes": 2},
        "metadata": {**form, **where},
        "coll_perf": performance,
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def inspector_files(last: int, *, stuck: int | None = None, late: int | None = None) -> dict[str, str]:
    """By file name, those of four ranks. ``stuck`` has not completed the last; ``late`` is the last to begin each."""
    return {
        f"node{7 + rank // 2}-pid{4100 + rank}.log": "".join(
            inspector_line(rank, number, 400 if rank == late else 1000 + 7 * rank + number % 5)
            for number in range(1, last + 1 - (rank == stuck))
        )
        for rank in range(4)
    }

# SPDX-License-Identifier: Apache-2.0
"""Whether a case fits into a host's memory: Linux would kill a process that finds out by using it."""

from pathlib import Path

from llmb.bench.jobs import AttentionCase, CopyCase, LaunchCase, ProductCase, TransferCase

Work = ProductCase | AttentionCase | CopyCase | TransferCase | LaunchCase
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 6}
"""Of one value of an operand; FP8 is made from bf16, and multiplied as fp32 on a CPU."""
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(work: Work) -> int:
    """Of operands and results; kernels need less than these for themselves."""
    if isinstance(work, ProductCase):
        return BYTES[work.dtype] * (work.m * work.k + work.n * work.k + work.m * work.n)
    if isinstance(work, AttentionCase):
        heads = 4 * work.heads + 4 * work.kv_heads
        return BYTES[work.dtype] * work.batch * work.seq_len * work.head_dim * heads
    if isinstance(work, CopyCase):
        return 2 * work.size_bytes
    return work.size_bytes if isinstance(work, TransferCase) else 0


def free_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What this process can still have, by the kernel and by the limit of its container; None where neither says."""
    return min(filter(None, (_available(meminfo), _left_in(cgroup))), default=None)


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _left_in(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(1, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else None

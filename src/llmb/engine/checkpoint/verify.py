# SPDX-License-Identifier: Apache-2.0
"""Verifies the checksums of a checkpoint's files before it is loaded; the ranks divide the files among them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from llmb.checkpoints.checkpoint import damage_error, read_checkpoint_record
from llmb.checkpoints.checksums import damaged_files
from llmb.checkpoints.times import Verified
from llmb.engine.parallel.mesh import Ranks

MOST_THREADS = 8


def verify_checkpoint(path: Path, ranks: Ranks, on_block: Callable[[], object], *, wanted: bool) -> Verified:
    """A collective: all ranks have to call it. ``on_block`` is called for every few MiB that were read.

    Raises UsageError, on all ranks, with the files whose content is not what was saved.
    """
    began = time.perf_counter()
    if not wanted:
        return _logged(Verified(verification="skipped"), ranks, f"{path} is not verified: skipped")
    checksums = read_checkpoint_record(path).crc32
    # Each rank's file is about as large as any other's.
    own = dict(sorted(checksums.items())[ranks.rank :: ranks.world_size])
    threads = min(torch.get_num_threads(), MOST_THREADS)
    found: list[list[str]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(found, list(damaged_files(path, own, threads=threads, on_block=on_block)))
    if damaged := [line for of_rank in found for line in of_rank]:
        raise damage_error(path, damaged)
    took_s = round(time.perf_counter() - began, 3)
    text = f"{path} is verified: {len(checksums)} files in {took_s:.3f} s"
    return _logged(Verified(verification="verified", verify_s=took_s), ranks, text)


def _logged(verified: Verified, ranks: Ranks, text: str) -> Verified:
    if ranks.is_first:
        sys.stdout.write(f"llmb: {text}\n")
    return verified

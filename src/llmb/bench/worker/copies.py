# SPDX-License-Identifier: Apache-2.0
"""Copies within a device's memory, and between host and device."""

import torch

from llmb.bench.jobs import CopyCase, TransferCase
from llmb.bench.worker.timing import PreparedCall


def copy(case: CopyCase, device: torch.device) -> PreparedCall:
    source = torch.randint(0, 255, (case.size_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return PreparedCall(lambda: target.copy_(source), flushes=True)


def transfer(case: TransferCase, device: torch.device) -> PreparedCall:
    """Copies from pinned memory are queued like kernels; those of pageable memory wait for the host."""
    here = torch.full((case.size_bytes,), 1, dtype=torch.uint8, pin_memory=case.pinned)
    there = torch.full((case.size_bytes,), 2, dtype=torch.uint8, device=device)
    source, target = (here, there) if case.direction == "host_to_device" else (there, here)
    return PreparedCall(lambda: target.copy_(source, non_blocking=case.pinned))

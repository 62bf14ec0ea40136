# SPDX-License-Identifier: Apache-2.0
"""Variables that workers get where the user has not set them, each with its reason. Pure."""

from collections.abc import Container
from typing import NamedTuple

from llmb.runs.host import Device


class ShippedVariable(NamedTuple):
    name: str
    value: str
    why: str
    device: Device | None = None
    """None for both."""
    also: tuple[str, ...] = ()
    """Other names of the same setting: setting one of them counts as setting this one."""


SHIPPED = (
    ShippedVariable("PYTHONUNBUFFERED", "1", "a line of the log is there when it is written"),
    ShippedVariable(
        "GOMP_SPINCOUNT",
        "10000",
        "threads that wait spin for some ten microseconds only: with the default, a core that something else used made "
        "a step 50 times as long",
        device="cpu",
    ),
    # Where one of both is set, glibc no longer raises the other by itself; 32 MiB is as far as it would have gone.
    ShippedVariable(
        "MALLOC_TRIM_THRESHOLD_",
        str(2**40),
        "memory that a step frees is there for the next: returned to the kernel and fetched again, page by page, it "
        "made a bf16 step of 90 million parameters 7 % longer",
        device="cpu",
    ),
    ShippedVariable(
        "MALLOC_MMAP_THRESHOLD_",
        str(2**25),
        "likewise, for tensors of up to 32 MiB",
        device="cpu",
    ),
    ShippedVariable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "memory that is free stays usable: fixed segments leave gaps that no later tensor fits",
        device="cuda",
        also=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    # As in Megatron-Bridge's scripts for published runs, for every GPU type (scripts/performance/utils/executors.py).
    ShippedVariable(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "what others wait for goes first: a collective does not queue behind computation that is independent of it",
        device="cuda",
    ),
)


def shipped_variables(device: Device, known: Container[str]) -> dict[str, str]:
    """Variables for ``device``, but for settings that the user made under another name; ``known`` are the user's."""
    return {
        item.name: item.value
        for item in SHIPPED
        if item.device in (None, device) and not any(name in known for name in item.also)
    }

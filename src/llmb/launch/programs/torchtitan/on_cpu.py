# SPDX-License-Identifier: Apache-2.0
"""Replaces functions that do not work on a CPU, so that torchtitan 0.2.2 can train there.

It replaces the name of the device, five functions that ``torch.cpu`` lacks, barriers with device ids, histograms of
integers, the Triton kernel that sorts tokens by expert (with torchtitan's own code for CPUs), and FSDP's fused scaling
and reduction of gradients, which gloo lacks. Models, attention, sharding and optimizer are unchanged. Memory is not
measured; the log reports 0.
"""

import importlib
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def replace_device_functions() -> None:
    """Replace functions of torch and torchtitan; call this before torchtitan's trainer is imported."""
    no_memory = types.SimpleNamespace(total_memory=1, name="cpu")
    functions: dict[str, Any] = {
        "get_device_name": lambda _device=None: "cpu",
        "get_device_properties": lambda _device=None: no_memory,
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda _device=None: {f"{kind}_bytes.all.peak": 0 for kind in ("active", "reserved")},
    }
    for name, function in functions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    histogram = torch.histc
    torch.histc = lambda values, **range_: histogram(values.float(), **range_).to(values.dtype)
    barrier = dist.barrier

    def barrier_without_devices(
        group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: object = None
    ) -> Any:  # noqa: ANN401 (as torch's)
        del device_ids
        return barrier(group, async_op)

    dist.barrier = barrier_without_devices  # type: ignore[assignment]
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    kernels: Any = importlib.import_module("torchtitan.models.moe.kernels")
    kernels.fill_indices_wrapper = kernels.fill_indices_cpu  # both are torchtitan's
    FSDPModule.set_gradient_divide_factor = set_factor_of_sum  # type: ignore[assignment, method-assign]

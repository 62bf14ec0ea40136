# SPDX-License-Identifier: Apache-2.0
"""Replaces functions that do not work on a CPU, so that torchtitan 0.2.2 can train there.

It replaces the name of the device, five functions that ``torch.cpu`` lacks, barriers with device ids, and histograms
of integers; the Triton kernel that sorts tokens by expert (with torchtitan's own code for CPUs); FSDP's fused scaling
and reduction of gradients, which gloo lacks; the compiled FlexAttention of gpt-oss and DeepSeek-V3, which has no
backward pass on CPUs; and attention of DTensors (Qwen3 with tensor parallelism), which torch lacks on CPUs. Models,
masks, sharding and optimizer are unchanged. Memory is not measured; the log reports 0.
"""

import importlib
import math
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: flex_attention.BlockMask,
    scale: float,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute FlexAttention in fp32 from all scores; ``return_lse`` adds the logsumexp, which gpt-oss's sinks need."""
    shared = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (each.float().repeat_interleave(shared, dim=1) for each in (key, value))
    scores = query.float() @ key.mT * scale
    queries, keys = scores.shape[-2:]
    seen = flex_attention.create_mask(block_mask.mask_mod, None, None, queries, keys, device="cpu")
    scores = scores.masked_fill(~seen, -math.inf)
    total = scores.logsumexp(dim=-1)
    result = ((scores - total.unsqueeze(-1)).exp() @ value).to(query.dtype)
    return (result, total) if return_lse else result


def replace_attention() -> None:
    """Replace compiled FlexAttention; compute the attention of DTensors, which are sharded by heads, on local heads."""
    attention: Any = importlib.import_module("torchtitan.models.attention")
    attention.FlexAttentionWrapper._compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = flex_attention.create_block_mask
    forward = attention.ScaledDotProductAttentionWrapper.forward

    def forward_of_shards(module: object, *inputs: torch.Tensor, **named: Any) -> Any:  # noqa: ANN401 (as torchtitan's)
        first = inputs[0]
        if not isinstance(first, DTensor):
            return forward(module, *inputs, **named)
        result = forward(module, *(each.to_local() for each in inputs if isinstance(each, DTensor)), **named)
        return DTensor.from_local(result, first.device_mesh, first.placements)

    attention.ScaledDotProductAttentionWrapper.forward = forward_of_shards


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

    replace_attention()
    kernels: Any = importlib.import_module("torchtitan.models.moe.kernels")
    kernels.fill_indices_wrapper = kernels.fill_indices_cpu  # both are torchtitan's
    FSDPModule.set_gradient_divide_factor = set_factor_of_sum  # type: ignore[assignment, method-assign]

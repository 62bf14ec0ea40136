# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallel (FSDP2): every rank keeps a share of parameters, gradients and optimizer state."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llmb.catalogue.records import Dtype
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import Experts, MoELayer


def shard(model: Decoder, mesh: DeviceMesh, experts: DeviceMesh, dtype: Dtype, *, keep_whole: bool = False) -> None:
    """Shards ``model`` in place, block by block, so that only one block's parameters are whole at a time.

    Routed experts are shared out over the ranks of ``experts``, all else over those of ``mesh``.

    ``keep_whole`` keeps gathered parameters for the backward pass: under pipeline parallelism they would otherwise be
    gathered twice for every micro-batch.
    """
    policy = precision_policy(dtype)
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        shard_experts(layer.experts, experts, mesh.size(), policy, keep_whole=keep_whole)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_whole)


def outer_features(parameter: nn.Parameter) -> Shard:
    """The dimension of stacked matrices that counts hidden features: expert parallelism cuts the other two."""
    return Shard(2 if parameter.ndim == 3 else 1)


def shard_experts(
    module: Experts, mesh: DeviceMesh, batches: int, policy: MixedPrecisionPolicy, *, keep_whole: bool
) -> None:
    """Shards stacked experts by their outer features, as there may be more ranks than experts on each.

    Their gradients sum up over all tokens of a pipeline stage, wherever the tokens come from, so that the mean is over
    ``batches``, the ranks whose losses the step's loss is the mean of, and not over those of ``mesh``.
    """
    fully_shard(
        module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_whole, shard_placement_fn=outer_features
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(batches)
    # Gloo cannot multiply while it reduces; where there is nothing to reduce, torch would then divide twice.
    module.set_force_sum_reduction_for_comms(mesh.size() > 1)


def compute_dtype(dtype: Dtype) -> torch.dtype:
    """What blocks compute in, and hidden states are."""
    return torch.float32 if dtype is Dtype.FP32 else torch.bfloat16


def precision_policy(dtype: Dtype) -> MixedPrecisionPolicy:
    """Master weights stay in fp32 and gradients are reduced in fp32; bf16 is what blocks compute in.

    Inputs are left as they are: hidden states follow the parameters, and the tables of rotary angles stay in fp32.
    """
    if dtype is Dtype.FP32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduce_dtype = torch.float32
    return MixedPrecisionPolicy(compute_dtype(dtype), reduce_dtype, cast_forward_inputs=False)


def accumulate(model: Decoder, *, last: bool) -> None:
    """Says whether the coming backward pass is a step's last: gradients are reduced once a step, not each time."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)

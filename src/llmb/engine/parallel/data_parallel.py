# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of ranks that shard parameters, gradients and optimizer state (FSDP2): ``--dp-sharding full``."""

from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llmb.catalogue.records import Dtype
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.moe import Experts, MoELayer
from llmb.runs.plan import EnginePlan


def shard(
    model: Decoder, mesh: DeviceMesh, experts: DeviceMesh, policy: MixedPrecisionPolicy, *, keep_whole: bool = False
) -> None:
    """Shard ``model`` in place, routed experts over ``experts``. ``keep_whole`` keeps gathered parameters for the
    backward pass."""
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        shard_experts(layer.experts, experts, mesh.size(), policy, keep_whole=keep_whole)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_whole)
    prefetch_blocks(model)


def prefetch_blocks(model: Decoder) -> None:
    """Make each block prefetch the next block's parameters before it computes."""
    for module, following in pairwise([model, *model.layers.values()]):
        assert isinstance(module, FSDPModule)
        parts = [following, *(part for part in following.modules() if isinstance(part, Experts))]
        module.set_modules_to_forward_prefetch([part for part in parts if isinstance(part, FSDPModule)])


def shard_experts(
    module: Experts, mesh: DeviceMesh, batches: int, policy: MixedPrecisionPolicy, *, keep_whole: bool
) -> None:
    """Shard stacked experts by the hidden dimension. ``batches``: the number of ranks whose losses are averaged."""
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=not keep_whole,
        # The hidden dimension of stacked matrices: expert parallelism shards the other two.
        shard_placement_fn=lambda parameter: Shard(2 if parameter.ndim == 3 else 1),
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(batches)
    # Gloo cannot multiply while it reduces; without sharding, torch would then divide twice.
    module.set_force_sum_reduction_for_comms(mesh.size(mesh.ndim - 1) > 1)


def compute_dtype(dtype: Dtype) -> torch.dtype:
    """Return the dtype of hidden states, in which blocks compute."""
    return torch.float32 if dtype is Dtype.FP32 else torch.bfloat16


def precision_policy(plan: EnginePlan) -> MixedPrecisionPolicy:
    """Return FSDP's policy: compute in bf16 (fp32 if the recipe does), reduce in ``reduce_dtype``, do not cast
    inputs."""
    dtype = plan.recipe.dtype
    if dtype is Dtype.FP32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(compute_dtype(dtype), reduce_dtype(plan), cast_forward_inputs=False)


def reduce_dtype(plan: EnginePlan) -> torch.dtype:
    """Return the dtype of sums of gradients over micro-batches and ranks."""
    exact = plan.recipe.dtype is Dtype.FP32 or plan.recipe.training.grad_reduce_dtype == "fp32"
    return torch.float32 if exact else torch.bfloat16

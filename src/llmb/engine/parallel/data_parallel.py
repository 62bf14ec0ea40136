# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallel (FSDP2): every rank keeps a share of parameters, gradients and optimizer state."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llmb.catalogue.records import Dtype
from llmb.engine.model.decoder import Decoder


def shard(model: Decoder, mesh: DeviceMesh, dtype: Dtype, *, keep_whole: bool = False) -> None:
    """Shards ``model`` in place, block by block, so that only one block's parameters are whole at a time.

    ``keep_whole`` keeps gathered parameters for the backward pass: under pipeline parallelism they would otherwise be
    gathered twice for every micro-batch.
    """
    policy = precision_policy(dtype)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_whole)


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

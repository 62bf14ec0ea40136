# SPDX-License-Identifier: Apache-2.0
"""Local shards of parameters."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_shard(parameter: Tensor, *, same_tokens: bool = False) -> Tensor:
    """This rank's shard of a tensor-parallel parameter (a DTensor), sharded or replicated; other parameters unchanged.

    Ranks with replicas of a parameter process different tokens, so each has a partial sum of the gradient; with
    ``same_tokens`` each has the full gradient.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    copied = Replicate() if same_tokens else Partial()
    gradient = [copied if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=gradient)
    return part


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that needs no gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is sharded like ``parameter`` and has ``local`` as this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

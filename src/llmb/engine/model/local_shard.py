# SPDX-License-Identifier: Apache-2.0
"""The part of a parameter that this rank computes with."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional


def local_shard(parameter: Tensor, *, same_tokens: bool = False) -> Tensor:
    """This rank's part of a parameter that tensor parallelism cut or copied (a DTensor); any other as it is.

    Ranks that hold copies of a parameter see different tokens, so that each has a part of the gradient's sum; where
    they see the ``same_tokens``, each has all of it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    copied = Replicate() if same_tokens else Partial()
    gradient = [copied if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=gradient)
    return part


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that no gradient flows through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Linear(nn.Linear):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, local_shard(self.weight))

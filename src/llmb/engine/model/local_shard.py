# SPDX-License-Identifier: Apache-2.0
"""Local shards of parameters."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from llmb.engine.model.gradient_sum import GradientSum


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


class Linear(nn.Linear):
    """A matrix without bias.

    gradients: where its products add the weight's gradient; None for autograd's.
    """

    gradients: GradientSum | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        if self.gradients is not None:
            return self.gradients.multiply(hidden, weight, weight)
        return functional.linear(hidden, weight)

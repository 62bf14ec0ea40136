# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of linear layers (LoRA; Hu et al., 2021)."""

import math

from torch import Tensor, nn

from llmb.catalogue.records import Lora
from llmb.engine.model.local_shard import Linear

OWN, FUSED = "adapter", "qkv_adapter"
"""Names of the two kinds of adapters among the submodules of a linear layer, and of attention."""


class Adapter(nn.Module):
    """What is added to the output of a frozen linear layer: ``scale * b(a(dropout(hidden)))``.

    [..., inputs] to [..., outputs].

    Tensor-parallel ranks replicate the matrix on the side that they do not shard in the layer. A layer whose inputs are
    sharded then has a partial sum as its adapter's output too, which is reduced together with the layer's.
    """

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.a = Linear(layer.in_features, lora.rank)
        self.b = Linear(lora.rank, layer.out_features)
        self.scale = lora.scale
        self.dropout: nn.Module = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.b(self.a(self.dropout(hidden)) * self.scale)
        return added


class FusedAdapter(nn.Module):
    """The adapter of several layers with the same input as if they were one: they share A, and have their rows of B."""

    def __init__(self, layers: dict[str, nn.Linear], lora: Lora) -> None:
        super().__init__()
        (inputs,) = {layer.in_features for layer in layers.values()}
        self.a = Linear(inputs, lora.rank)
        self.b = nn.ModuleDict({name: Linear(lora.rank, layer.out_features) for name, layer in layers.items()})
        self.scale = lora.scale
        self.dropout: nn.Module = nn.Identity()

    def forward(self, hidden: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of the layers, in order, with what the adapter adds to each; they may be split into heads."""
        low = self.a(self.dropout(hidden)) * self.scale
        return tuple(output + part(low).view_as(output) for output, part in zip(outputs, self.b.values(), strict=True))


def is_of_adapter(name: str) -> bool:
    """Whether a parameter, given by its full name, belongs to an adapter."""
    return not {OWN, FUSED}.isdisjoint(name.split("."))


def adapter_deviation(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of an adapter's initial values: Xavier's for A, and 0 for B, so that training starts with
    the base's outputs, as in Megatron-Bridge."""
    is_a = name.split(".")[-2] == "a"
    return math.sqrt(2 / sum(shape)) if is_a else 0.0

# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of linear layers (LoRA; Hu et al., 2021), and dropout that does not depend on the layout."""

import hashlib
import math

import torch
from torch import Tensor, nn

from llmb.catalogue.records import Lora
from llmb.engine.collectives import Group
from llmb.engine.model.linear import SEQUENCE, Joined, Linear

OWN, FUSED = "adapter", "qkv_adapter"
"""Names of submodules: the adapter of a linear layer, and the fused adapter of attention."""


class Adapter(nn.Module):
    """The low-rank summand of a frozen linear layer's output: ``scale * b(a(dropout(hidden)))``, [..., outputs]."""

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
    """The joint adapter of several layers with the same input: they share A, and have separate rows of B."""

    def __init__(self, layers: dict[str, nn.Linear], lora: Lora) -> None:
        super().__init__()
        (inputs,) = {layer.in_features for layer in layers.values()}
        self.a = Linear(inputs, lora.rank)
        self.b = nn.ModuleDict({name: Linear(lora.rank, layer.out_features) for name, layer in layers.items()})
        self.parts = Joined(self.b, *layers)
        self.scale = lora.scale
        self.dropout: nn.Module = nn.Identity()

    def forward(self, hidden: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the layers' ``outputs``, which may be split into heads, plus the adapter's outputs, in order."""
        added = self.parts(self.a(self.dropout(hidden)) * self.scale)
        return tuple(output + part.view_as(output) for output, part in zip(outputs, added, strict=True))


def is_of_adapter(name: str) -> bool:
    """Return True if the parameter with this full name belongs to an adapter."""
    return not {OWN, FUSED}.isdisjoint(name.split("."))


def adapter_deviation(name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of an adapter's initial values: Xavier's for A, 0 for B, as in Megatron-Bridge."""
    is_a = name.split(".")[-2] == "a"
    return math.sqrt(2 / sum(shape)) if is_a else 0.0


WORD = 0xFFFFFFFF


class TokenKeys:
    """Keys of the current micro-batch's tokens, [batch, seq] int64, which do not depend on the layout."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set(self, samples: range, positions: Tensor, seq_len: int) -> None:
        """Set the keys. samples: the micro-batch's sample numbers. positions: of this rank's tokens, [seq]."""
        numbers = torch.arange(samples.start, samples.stop, device=positions.device).unsqueeze(-1) * seq_len + positions
        keys = mixed(numbers) + (numbers >> 32)
        if self.value is None or self.value.shape != keys.shape:
            self.value = keys
        else:
            self.value.copy_(keys)  # in place: compiled code has taken it as an input


class Dropout(nn.Module):
    """Zeros elements of [batch, seq, features] with the given probability, and scales the rest."""

    group: Group | None = None
    """Ranks that each hold a shard of the sequence; None if it is whole."""

    def __init__(self, probability: float, name: str, seed: int, tokens: TokenKeys) -> None:
        super().__init__()
        self.probability = probability
        self.tokens = tokens
        self.salt = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little")
        self.first_feature = 0
        """Index of this rank's first feature, if features are sharded."""

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = self.tokens.value
        assert tokens is not None, "the tokens of a micro-batch are set before its forward pass"
        if self.group is not None:
            tokens = tokens.chunk(self.group.size, SEQUENCE)[self.group.rank]
        features = torch.arange(hidden.shape[-1], device=hidden.device) + self.first_feature
        drawn = mixed(tokens.unsqueeze(-1) + mixed(features + self.salt))
        kept = drawn >= int(self.probability * (WORD + 1))
        return hidden * kept / (1 - self.probability)


def mixed(numbers: Tensor) -> Tensor:
    """Return a hash of the low 32 bits of each int64 number, a bijection of 32 bits (Wellons, lowbias32)."""
    numbers = numbers & WORD
    numbers = ((numbers ^ (numbers >> 16)) * 0x7FEB352D) & WORD
    numbers = ((numbers ^ (numbers >> 15)) * 0x846CA68B) & WORD
    return numbers ^ (numbers >> 16)

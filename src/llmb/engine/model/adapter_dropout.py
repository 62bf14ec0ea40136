# SPDX-License-Identifier: Apache-2.0
"""Dropout of adapters' inputs that does not depend on the layout.

Whether an element is dropped follows from a hash of the seed, the adapter, the token (its sample and position) and the
feature: every rank finds the same for its shard of a tensor, and so does a recomputed or resumed pass.
"""

import hashlib

import torch
from torch import Tensor, nn

WORD = 0xFFFFFFFF


class TokenKeys:
    """A number for every token of the current micro-batch: [batch, seq] int64, equal for equal tokens in any layout."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set(self, samples: range, positions: Tensor, seq_len: int) -> None:
        """``samples``: numbers within the training. ``positions``: those of a sequence that this rank has, [seq]."""
        numbers = torch.arange(samples.start, samples.stop, device=positions.device).unsqueeze(-1) * seq_len + positions
        keys = mixed(numbers) + (numbers >> 32)
        if self.value is None or self.value.shape != keys.shape:
            self.value = keys
        else:
            self.value.copy_(keys)  # in place: compiled code has taken it as an input


class Dropout(nn.Module):
    """Zeros elements of [batch, seq, features] with the given probability, and scales the others.

    ``first_feature`` is that of the first element of a tensor whose features are sharded.
    """

    def __init__(self, probability: float, name: str, seed: int, tokens: TokenKeys) -> None:
        super().__init__()
        self.probability = probability
        self.tokens = tokens
        self.salt = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little")
        self.first_feature = 0

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = self.tokens.value
        assert tokens is not None, "the tokens of a micro-batch are set before its forward pass"
        features = torch.arange(hidden.shape[-1], device=hidden.device) + self.first_feature
        drawn = mixed(tokens.unsqueeze(-1) + mixed(features + self.salt))
        kept = drawn >= int(self.probability * (WORD + 1))
        return hidden * kept / (1 - self.probability)


def mixed(numbers: Tensor) -> Tensor:
    """A bijective hash of the low 32 bits of int64 numbers (Wellons, lowbias32)."""
    numbers = numbers & WORD
    numbers = ((numbers ^ (numbers >> 16)) * 0x7FEB352D) & WORD
    numbers = ((numbers ^ (numbers >> 15)) * 0x846CA68B) & WORD
    return numbers ^ (numbers >> 16)

# SPDX-License-Identifier: Apache-2.0
"""Synthetic tokens. A sample depends on the seed and its number alone, so that every layout trains on the same data."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmb.catalogue.records import Layout


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Random tokens: uniform, or Zipf-distributed, whose frequencies a model can learn."""

    vocab_size: int
    seq_len: int
    seed: int
    distribution: Literal["uniform", "zipf"]

    def sample(self, number: int) -> Tensor:
        """[seq_len + 1] int64: the tokens of one sequence and, shifted by one, its labels."""
        digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        shape = (self.seq_len + 1,)
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, shape, generator=generator)
        # The inverse of the distribution function of 1/k frequencies, taken as continuous: k = (V + 1)^u.
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        ranks = torch.exp(uniform * math.log(self.vocab_size + 1)).long() - 1
        return ranks.clamp_(0, self.vocab_size - 1)


def micro_batches(
    data: SyntheticData, layout: Layout, first_sample: int, dp_rank: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, [mbs, seq_len] each, of every micro-batch of this rank.

    All ranks together see the GBS samples from ``first_sample`` on, whatever the layout.
    """
    for index in range(layout.ga):
        first = first_sample + (index * layout.dp + dp_rank) * layout.mbs
        samples = torch.stack([data.sample(first + offset) for offset in range(layout.mbs)])
        if device.type == "cuda":
            samples = samples.pin_memory().to(device, non_blocking=True)
        yield samples[:, :-1], samples[:, 1:]

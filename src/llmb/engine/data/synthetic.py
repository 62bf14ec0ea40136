# SPDX-License-Identifier: Apache-2.0
"""Synthetic tokens. A sample depends only on the seed and its number, so every layout trains on the same data."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmb.catalogue.records import DocumentLengths
from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.loss import IGNORED
from llmb.metrics.packing import document_lengths, longest_document


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Random tokens: uniform, or Zipf-distributed, whose frequencies a model can learn.

    With ``document_tokens`` each sequence is packed from documents of that many tokens on average.
    """

    vocab_size: int
    seq_len: int
    seed: int
    distribution: Literal["uniform", "zipf"]
    document_tokens: int | None = None
    document_lengths: DocumentLengths = "uniform"

    def sample(self, number: int) -> Tensor:
        """[seq_len + 1] int64: the tokens of one sequence and, shifted by one, its labels."""
        generator = _generator(f"{self.seed} {number}")
        shape = (self.seq_len + 1,)
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, shape, generator=generator)
        # The inverse of the distribution function of 1/k frequencies, treated as continuous: k = (V + 1)^u.
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        ranks = torch.exp(uniform * math.log(self.vocab_size + 1)).long() - 1
        return ranks.clamp_(0, self.vocab_size - 1)

    def document_starts(self, number: int, document_tokens: int) -> Tensor:
        """[seq_len] int64: position in the sequence at which the document of each token begins.

        Lengths are drawn from ``document_lengths``; the last document is truncated at the end of the sequence.
        """
        generator = _generator(f"{self.seed} {number} documents")
        likely = torch.tensor(document_lengths(document_tokens, self.document_lengths))
        lengths = likely[torch.randint(len(likely), (self.seq_len,), generator=generator)]
        begins = lengths.cumsum(0) - lengths
        places = torch.arange(self.seq_len)
        return begins[torch.searchsorted(begins, places, right=True) - 1]

    def longest_document(self) -> int:
        if self.document_tokens is None:
            return self.seq_len
        return min(self.seq_len, longest_document(self.document_tokens, self.document_lengths))

    def micro_batch(self, numbers: range) -> MicroBatch:
        """The samples with these numbers. The last token of a document has no label."""
        samples = torch.stack([self.sample(number) for number in numbers])
        tokens, labels = samples[:, :-1], samples[:, 1:]
        if self.document_tokens is None:
            return MicroBatch(tokens, labels, None)
        starts = torch.stack([self.document_starts(number, self.document_tokens) for number in numbers])
        last = torch.ones_like(starts, dtype=torch.bool)
        last[:, :-1] = starts[:, 1:] != starts[:, :-1]
        return MicroBatch(tokens, labels.masked_fill(last, IGNORED), starts)


def _generator(name: str) -> torch.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

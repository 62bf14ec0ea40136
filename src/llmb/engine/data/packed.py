# SPDX-License-Identifier: Apache-2.0
"""The samples of a packed dataset (``prepared.packed_dataset``), in another order in every epoch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmb.engine.data.batches import MicroBatch
from llmb.engine.data.shuffle import shuffled
from llmb.engine.model.loss import IGNORED
from llmb.prepared.packed_dataset import PackedArrays, map_arrays
from llmb.runs.plan import TrainingDataset


@dataclass(frozen=True, slots=True)
class PackedData:
    """Sample n is a pack of epoch n // packs. Padding at its end has the token ``padding`` and no labels."""

    arrays: PackedArrays
    seq_len: int
    vocab_size: int
    padding: int
    seed: int

    @property
    def packs(self) -> int:
        return len(self.arrays.packs) - 1

    def pack(self, number: int) -> int:
        """The pack of a sample."""
        epoch, place = divmod(number, self.packs)
        return shuffled(place, self.packs, f"{self.seed} {epoch}")

    def longest_document(self) -> int:
        """Reads where all documents and packs begin."""
        documents, packs = self.arrays.documents, self.arrays.packs
        taken = np.diff(documents[packs]) - np.diff(packs)
        return int(max((np.diff(documents) - 1).max(), self.seq_len - taken.min()))

    def micro_batch(self, numbers: range) -> MicroBatch:
        """Raises ValueError if a pack has a token outside the vocabulary."""
        rows, taken = zip(*(self._row(number) for number in numbers), strict=True)
        tokens, labels, starts = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return MicroBatch(tokens, labels, starts, taken)

    def _row(self, number: int) -> tuple[list[Tensor], int]:
        """Tokens, labels and starts of a sample, [seq_len] each, and the places that documents take."""
        pack = self.pack(number)
        first, end = self.arrays.packs[pack : pack + 2]
        bounds = self.arrays.documents[first : end + 1]
        of_pack = slice(bounds[0], bounds[-1])
        tokens = self.arrays.tokens[of_pack].astype(np.int64)
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"pack {pack} has the token {tokens.max()}; the vocabulary has {self.vocab_size}")
        targets = np.where(self.arrays.answers[of_pack], tokens, IGNORED)
        # The last token of a document is not an input, and its first one is no label.
        is_input, is_label = np.ones((2, len(tokens)), dtype=np.bool_)
        is_input[bounds[1:] - bounds[0] - 1] = False
        is_label[bounds[:-1] - bounds[0]] = False
        lengths = np.diff(bounds) - 1
        taken = int(lengths.sum())
        starts = np.repeat(lengths.cumsum() - lengths, lengths)
        parts = (tokens[is_input], self.padding), (targets[is_label], IGNORED), (starts, taken)
        return [torch.from_numpy(_filled(values, self.seq_len, with_)) for values, with_ in parts], taken


def _filled(values: np.ndarray, length: int, with_: int) -> np.ndarray:
    return np.concatenate((values, np.full(length - len(values), with_, dtype=np.int64)))


def open_packed(dataset: TrainingDataset, vocab_size: int, seed: int) -> PackedData:
    """Maps the dataset's arrays. Raises OSError or ValueError if one cannot be mapped."""
    record = dataset.packed
    arrays = map_arrays(Path(dataset.path))
    return PackedData(arrays, record.seq_len, vocab_size, record.tokenizer.eos_id, seed)

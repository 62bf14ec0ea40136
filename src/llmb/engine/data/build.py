# SPDX-License-Identifier: Apache-2.0
"""The data of a run: random tokens, or packed documents in a random order."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from llmb.base.errors import UsageError, itemized
from llmb.catalogue.packing import document_lengths, longest_document
from llmb.catalogue.records import DocumentLengths
from llmb.engine.data.batches import MicroBatch, TrainingData
from llmb.engine.model.loss import IGNORED
from llmb.engine.parallel.mesh import Ranks, of_first_rank
from llmb.runs.checkpoints.checkpoint import dataset_problem, read_checkpoint_record
from llmb.runs.checkpoints.checkpoint_files import damaged_files
from llmb.runs.checkpoints.prepared_data import RECORD, PackedArrays, PackedDataset, incomplete_files, map_arrays
from llmb.runs.plan import EnginePlan, TrainingDataset

KINDS = {"tokens": np.uint32, "answers": np.bool_, "documents": np.int64, "packs": np.int64}


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Random tokens, uniform or Zipf-distributed, in documents of the mean length ``document_tokens``, if it is set."""

    vocab_size: int
    seq_len: int
    seed: int
    distribution: Literal["uniform", "zipf"]
    document_tokens: int | None = None
    document_lengths: DocumentLengths = "uniform"

    def sample(self, number: int) -> Tensor:
        """Return a sequence's tokens, [seq_len + 1] int64: all but the last are inputs, all but the first labels."""
        generator = _generator(f"{self.seed} {number}")
        shape = (self.seq_len + 1,)
        if self.distribution == "uniform":
            return torch.randint(self.vocab_size, shape, generator=generator)
        # The inverse of the distribution function of 1/k frequencies, treated as continuous: k = (V + 1)^u.
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        ranks = torch.exp(uniform * math.log(self.vocab_size + 1)).long() - 1
        return ranks.clamp_(0, self.vocab_size - 1)

    def document_starts(self, number: int, document_tokens: int) -> Tensor:
        """Return where in the sequence each token's document begins: [seq_len] int64."""
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


ROUNDS = 4
"""Number of rounds; each one changes both halves of a place. Three already look random (Luby and Rackoff, 1988)."""


def shuffled(place: int, count: int, key: str) -> int:
    """Return the number at ``place`` of the permutation ``key`` of 0 .. ``count`` - 1 (Black and Rogaway, 2002)."""
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    while True:
        row, column = divmod(place, columns)
        for number in range(ROUNDS):
            row = (row + _random(f"{key} {number} row {column}")) % rows
            column = (column + _random(f"{key} {number} column {row}")) % columns
        place = row * columns + column
        if place < count:
            return place


def _random(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class PackedData:
    """Packed documents. Sample n is a pack of epoch n // packs, padded with the token ``padding``."""

    arrays: PackedArrays
    seq_len: int
    vocab_size: int
    padding: int
    seed: int

    @property
    def packs(self) -> int:
        return len(self.arrays.packs) - 1

    def pack(self, number: int) -> int:
        epoch, place = divmod(number, self.packs)
        return shuffled(place, self.packs, f"{self.seed} {epoch}")

    def longest_document(self) -> int:
        """Return the length in tokens of the longest document or padding of any pack."""
        documents, packs = self.arrays.documents, self.arrays.packs
        filled = np.diff(documents[packs]) - np.diff(packs)
        return int(max((np.diff(documents) - 1).max(), self.seq_len - filled.min()))

    def micro_batch(self, numbers: range) -> MicroBatch:
        """Return the samples with these numbers; raise ValueError if one has a token outside the model's vocabulary."""
        rows, filled = zip(*(self._row(number) for number in numbers), strict=True)
        tokens, labels, starts = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return MicroBatch(tokens, labels, starts, filled)

    def _row(self, number: int) -> tuple[list[Tensor], int]:
        """Return tokens, labels and starts of a sample, [seq_len] each, and the number of tokens before its padding."""
        pack = self.pack(number)
        first, end = self.arrays.packs[pack : pack + 2]
        bounds = self.arrays.documents[first : end + 1]
        of_pack = slice(bounds[0], bounds[-1])
        tokens = self.arrays.tokens[of_pack].astype(np.int64)
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"pack {pack} has the token {tokens.max()}; the vocabulary has {self.vocab_size} tokens")
        targets = np.where(self.arrays.answers[of_pack], tokens, IGNORED)
        # The last token of a document is not an input, and its first one is not a label.
        is_input, is_label = np.ones((2, len(tokens)), dtype=np.bool_)
        is_input[bounds[1:] - bounds[0] - 1] = False
        is_label[bounds[:-1] - bounds[0]] = False
        lengths = np.diff(bounds) - 1
        filled = int(lengths.sum())
        starts = np.repeat(lengths.cumsum() - lengths, lengths)
        rows = []
        for values, filler in ((tokens[is_input], self.padding), (targets[is_label], IGNORED), (starts, filled)):
            padding = np.full(self.seq_len - len(values), filler, dtype=np.int64)
            rows.append(torch.from_numpy(np.concatenate((values, padding))))
        return rows, filled


def open_packed(dataset: TrainingDataset, vocab_size: int, seed: int) -> PackedData:
    """Map the dataset's arrays into memory; raise the errors of ``map_arrays`` if an array cannot be mapped."""
    record = dataset.packed
    arrays = map_arrays(Path(dataset.path))
    return PackedData(arrays, record.seq_len, vocab_size, record.tokenizer.eos_id, seed)


def build_data(plan: EnginePlan) -> TrainingData:
    training = plan.recipe.training
    if plan.dataset:
        return open_packed(plan.dataset, plan.recipe.model.vocab_size, plan.seed)
    return SyntheticData(
        vocab_size=plan.recipe.model.vocab_size,
        seq_len=plan.recipe.layout.seq_len,
        seed=plan.seed,
        distribution=training.data,
        document_tokens=training.document_tokens or None,
        document_lengths=training.document_lengths,
    )


def check_dataset(plan: EnginePlan, ranks: Ranks) -> None:
    """Check the dataset on the first rank; raise UsageError on all ranks if it cannot be used. A collective."""
    if problems := of_first_rank(lambda: list(dataset_problems(plan)), ranks):
        raise UsageError(
            f"the dataset of this run cannot be used:{itemized(problems)}",
            where=plan.dataset.path if plan.dataset else None,
            do=f"prepare it again with the same options and --force ('llmb prepare dataset {plan.recipe.workload} "
            f"{plan.recipe.size}'), or pass another with --dataset (a resumed run needs its checkpoint's dataset)",
        )


def dataset_problems(plan: EnginePlan) -> Iterator[str]:
    """Yield problems of the dataset's files and sizes, and differences from the dataset of the resumed checkpoint."""
    if plan.start and plan.start.consumed_samples:
        record = read_checkpoint_record(Path(plan.start.path))
        problem = dataset_problem(plan.dataset.packed if plan.dataset else None, record.dataset)
        yield from [problem] if problem else []
    if plan.dataset:
        packed, model = plan.dataset.packed, plan.recipe.model
        if packed.seq_len != (seq_len := plan.recipe.layout.seq_len):
            yield f"it is packed into sequences of {packed.seq_len} tokens, but the layout has sequences of {seq_len}"
        if packed.tokenizer.vocab_size > model.vocab_size:
            yield (
                f"the vocabulary of its tokenizer, {packed.tokenizer.name}, has {packed.tokenizer.vocab_size} tokens, "
                f"but the model's has {model.vocab_size}"
            )
        yield from _folder_problems(plan.dataset, checksums=plan.verify_checkpoint)


def _folder_problems(dataset: TrainingDataset, *, checksums: bool) -> Iterator[str]:
    folder = Path(dataset.path)
    if incomplete := list(incomplete_files(folder, dataset.packed.files)):
        yield from incomplete
        return
    try:
        packed = PackedDataset.model_validate_json((folder / RECORD).read_bytes())
        arrays = map_arrays(folder)
    except ValidationError as error:
        yield f"{RECORD} cannot be read: {error.errors()[0]['msg']}"
    except OSError as error:
        yield f"{error.strerror}: {error.filename}"
    except ValueError as error:
        yield f"an array cannot be read: {error}"
    else:
        if packed != dataset.packed:
            yield "it has been prepared again since the run was planned"
        problems = list(_array_problems(arrays, dataset.packed))
        if checksums and not problems:  # SQuAD packed to 4096 is 90 MB
            problems = list(damaged_files(folder, dataset.packed.crc32, threads=len(dataset.packed.crc32)))
        yield from problems


def _array_problems(arrays: PackedArrays, packed: PackedDataset) -> Iterator[str]:
    """Yield the first problem of arrays that the loader cannot use; read bounds of documents and packs, not tokens."""
    for name, kind in KINDS.items():
        array = getattr(arrays, name)
        if array.dtype != kind or array.ndim != 1:
            yield f"{name}.npy holds {array.dtype} {list(array.shape)}, not a list of {np.dtype(kind)}"
            return
    documents, packs = arrays.documents, arrays.packs
    if len(documents) - 1 != packed.documents or len(packs) - 1 != packed.packs or not packed.packs:
        counts = f"{len(documents) - 1} documents in {len(packs) - 1} packs"
        yield f"the arrays hold {counts}, not {packed.documents} in {packed.packs}"
    elif len(arrays.tokens) != len(arrays.answers):
        yield f"there are {len(arrays.tokens)} tokens, but answers for {len(arrays.answers)}"
    elif (documents[0], documents[-1]) != (0, len(arrays.tokens)) or (np.diff(documents) < 2).any():
        yield "documents.npy does not divide the tokens into documents of at least two"
    elif (packs[0], packs[-1]) != (0, packed.documents) or (np.diff(packs) < 1).any():
        yield "packs.npy does not divide the documents into packs of at least one"
    elif (np.diff(documents[packs]) - np.diff(packs)).max() > packed.seq_len:
        yield f"a pack has more than {packed.seq_len} tokens"

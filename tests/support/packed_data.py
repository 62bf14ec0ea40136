# SPDX-License-Identifier: Apache-2.0
"""Small packed datasets, written as ``llmb.runs.checkpoints.prepared_data`` describes them."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmb.runs.checkpoints.prepared_data import (
    ANSWERS,
    ARRAYS,
    DOCUMENTS,
    PACKS,
    RECORD,
    TOKENS,
    PackedDataset,
    TokenizerRecord,
)
from llmb.runs.plan import TrainingDataset

EOS = 1
Document = tuple[list[int], list[bool]]
"""Tokens, and for each whether it is part of the answer."""


def documents(lengths: Sequence[int], vocab_size: int, seed: int = 1) -> list[Document]:
    """Documents that take as many places; about a third of the tokens are the answer, the last one always."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        # Squared, so that some tokens are more frequent than others, which a model can learn.
        tokens = (rng.random(length + 1) ** 2 * (vocab_size - 2)).astype(int) + 2
        tokens[-1] = EOS
        answer = max(1, length // 3)
        made.append((tokens.tolist(), [False] * (length + 1 - answer) + [True] * answer))
    return made


def write_packed(
    folder: Path, packs: Sequence[Sequence[Document]], seq_len: int, vocab_size: int, name: str = "squad"
) -> TrainingDataset:
    """Writes a dataset of these packs, and returns what a plan says of it."""
    folder.mkdir(parents=True)
    flat = [document for pack in packs for document in pack]
    sizes = np.array([len(tokens) for tokens, _ in flat])
    arrays = {
        TOKENS: np.array([token for tokens, _ in flat for token in tokens], dtype=np.uint32),
        ANSWERS: np.array([answer for _, answers in flat for answer in answers], dtype=np.bool_),
        DOCUMENTS: np.concatenate(([0], sizes.cumsum())).astype(np.int64),
        PACKS: np.cumsum([0, *(len(pack) for pack in packs)]).astype(np.int64),
    }
    for file, array in arrays.items():
        np.save(folder / file, array)
    places = sizes - 1
    record = PackedDataset(
        llmb_version="0",
        prepared_at="2026-01-01T00:00:00Z",
        name=name,
        source="made for tests",
        split="training",
        template="squad-1",
        tokenizer=TokenizerRecord(name="llmb/tiny", sha256="0" * 64, vocab_size=vocab_size, bos_id=0, eos_id=EOS),
        seq_len=seq_len,
        documents=len(flat),
        left_out=0,
        packs=len(packs),
        places=int(places.sum()),
        counted_labels=sum(sum(answers[1:]) for _, answers in flat),
        longest_document=int(places.max()),
        sum_of_squares=int((places**2).sum()),
        files={file: (folder / file).stat().st_size for file in ARRAYS},
        crc32={file: f"{zlib.crc32((folder / file).read_bytes()):08x}" for file in ARRAYS},
    )
    (folder / RECORD).write_text(record.model_dump_json(indent=2) + "\n")
    return TrainingDataset(path=str(folder), packed=record)


def small_dataset(folder: Path, seq_len: int = 128, vocab_size: int = 512, packs: int = 12) -> TrainingDataset:
    """Packs of several documents with a tail of padding, of different lengths; some are nearly a whole sequence."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(packs):
        lengths: list[int] = []
        while (room := seq_len - sum(lengths)) > seq_len // 10:
            longest = room if number % 4 == 0 else seq_len // 3
            lengths.append(int(rng.integers(2, max(3, min(room, longest) + 1))))
        made.append(documents(lengths, vocab_size, seed=number))
    return write_packed(folder, made, seq_len, vocab_size)

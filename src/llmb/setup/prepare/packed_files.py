# SPDX-License-Identifier: Apache-2.0
"""Writes packed datasets: tokenizes all samples once, then packs them for each sequence length."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from llmb import __version__
from llmb.base.errors import UsageError
from llmb.runs.checkpoints.checkpoint_files import ChecksumWriter, new_folder
from llmb.runs.checkpoints.prepared_data import ANSWERS, DOCUMENTS, PACKS, RECORD, TOKENS, PackedDataset, Packer, Split
from llmb.runs.record import now
from llmb.setup.prepare.sample_files import SampleFiles, parse_line, read_prepared
from llmb.setup.prepare.tokenizer import LoadedTokenizer

if TYPE_CHECKING:
    import numpy as np

ENOUGH_FILL = 0.98


@dataclass(frozen=True, slots=True)
class Packs:
    """``order``, int64 [documents], is sorted by pack; ``packs``, int64 [packs + 1], has each pack's first document in
    ``order``.
    """

    packer: Packer
    order: "np.ndarray"
    packs: "np.ndarray"


def pack(lengths: "np.ndarray", seq_len: int, seed: int) -> Packs:
    """Pack documents of ``lengths`` places, int64 [documents], none longer than ``seq_len``, shuffled or by decreasing
    length.
    """
    shuffled = _first_fit(lengths, seq_len, seed, "first-fit-shuffle")
    if fill(shuffled, lengths, seq_len) >= ENOUGH_FILL:
        return shuffled
    decreasing = _first_fit(lengths, seq_len, seed, "first-fit-decreasing")
    return min(shuffled, decreasing, key=lambda packing: len(packing.packs))


def fill(packing: Packs, lengths: "np.ndarray", seq_len: int) -> float:
    """Return the fraction of the places in all packs that documents fill."""
    return int(lengths.sum()) / ((len(packing.packs) - 1) * seq_len)


def _first_fit(lengths: "np.ndarray", seq_len: int, seed: int, packer: Packer) -> Packs:
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(lengths))
    if packer == "first-fit-decreasing":
        order = order[np.argsort(-lengths[order], kind="stable")]
    places = first_fit(lengths[order].tolist(), seq_len)
    number = np.asarray(places, dtype=np.int64)
    packs = np.concatenate([[0], np.cumsum(np.bincount(number))]).astype(np.int64)
    return Packs(packer, order[np.argsort(number, kind="stable")].astype(np.int64), packs)


def first_fit(lengths: list[int], seq_len: int) -> list[int]:
    """Return the pack number of each document: the first pack with enough room at the document's turn."""
    leaves = 1
    while leaves < 2 * sum(lengths) // seq_len + 2:
        leaves *= 2
    room = [seq_len] * (2 * leaves)
    numbers = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        numbers.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return numbers


BATCH = 1000
"""Number of samples to encode at a time."""
CHUNK = 4096
"""Number of documents to copy at a time."""
SEED = 1234
"""Seed of the shuffle before packing: the same samples give the same packs."""


@dataclass(frozen=True, slots=True)
class Documents:
    """All samples of a split as tokens, in the order of the samples."""

    tokens: "np.ndarray"
    """uint32 [tokens], mapped into memory."""
    starts: "np.ndarray"
    """int64 [samples + 1]: the position in ``tokens`` at which each sample begins, and the end."""
    prompts: "np.ndarray"
    """int64 [samples]: the number of tokens before each answer."""


def tokenize(path: Path, temporary: Path, tokenizer: LoadedTokenizer, on_count: Callable[[int], object]) -> Documents:
    """Encode the samples in ``path`` into a file in ``temporary``.

    Raise OSError if a file cannot be read or written.
    """
    import numpy as np

    target = temporary / "tokens"
    starts, prompts = [0], []
    with path.open("rb") as lines, target.open("wb") as stream:
        while batch := [parse_line(line) for line in islice(lines, BATCH)]:
            for tokens, prompt in tokenizer.encode(batch):
                stream.write(np.asarray(tokens, dtype=np.uint32).tobytes())
                starts.append(starts[-1] + len(tokens))
                prompts.append(prompt)
            on_count(len(prompts))
    mapped = np.memmap(target, dtype=np.uint32, mode="r")
    return Documents(mapped, np.asarray(starts, dtype=np.int64), np.asarray(prompts, dtype=np.int64))


def write_packed(
    folder: Path,
    documents: Documents,
    samples: SampleFiles,
    tokenizer: LoadedTokenizer,
    split: Split,
    seq_len: int,
    name: str,
) -> PackedDataset:
    """Pack documents that fit ``seq_len`` into a dataset.

    Raise UsageError if none fits or ``folder`` is occupied, EnvironmentProblem on failure.
    """
    import numpy as np

    places = np.diff(documents.starts) - 1
    fitting = np.flatnonzero(places <= seq_len)
    if not len(fitting):
        what = f"no sample of {split} fits into {seq_len} places; the shortest takes {places.min()}"
        do = "pass a larger --seq-len, or other samples with --source and --force"
        raise UsageError(what, where=samples.source, do=do)
    packing = pack(places[fitting], seq_len, SEED)
    order = fitting[packing.order]
    with new_folder(folder) as partial:
        checksums = _write_arrays(partial, documents, order, packing)
        record = PackedDataset(
            llmb_version=__version__,
            prepared_at=now(),
            name=name,
            source=samples.source,
            split=split,
            template=samples.template,
            tokenizer=tokenizer.record,
            seq_len=seq_len,
            documents=len(order),
            left_out=len(places) - len(order),
            packing=packing.packer,
            packs=len(packing.packs) - 1,
            places=int(places[order].sum()),
            # A document's first token is not a label, also where there is no prompt before the answer.
            counted_labels=int((places[order] + 1 - np.maximum(documents.prompts[order], 1)).sum()),
            longest_document=int(places[order].max()),
            sum_of_squares=int((places[order] ** 2).sum()),
            files={file: (partial / file).stat().st_size for file in checksums},
            crc32=checksums,
        )
        _flushed(partial / RECORD, (record.model_dump_json(indent=2) + "\n").encode())
    return record


def read_packed(folder: Path) -> PackedDataset | None:
    return read_prepared(folder / RECORD, PackedDataset)


def _write_arrays(folder: Path, documents: Documents, order: "np.ndarray", packing: Packs) -> dict[str, str]:
    import numpy as np

    lengths = np.diff(documents.starts)[order]
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    chunks = [order[first : first + CHUNK] for first in range(0, len(order), CHUNK)]
    tokens = (_tokens_of(documents, chunk) for chunk in chunks)
    answers = (_answers_of(documents, chunk) for chunk in chunks)
    return {
        TOKENS: _write_array(folder / TOKENS, np.dtype(np.uint32), total, tokens),
        ANSWERS: _write_array(folder / ANSWERS, np.dtype(np.bool_), total, answers),
        DOCUMENTS: _write_array(
            folder / DOCUMENTS, np.dtype(np.int64), len(order) + 1, [np.zeros(1, np.int64), ends.astype(np.int64)]
        ),
        PACKS: _write_array(folder / PACKS, np.dtype(np.int64), len(packing.packs), [packing.packs]),
    }


def _tokens_of(documents: Documents, chunk: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.concatenate([documents.tokens[documents.starts[n] : documents.starts[n + 1]] for n in chunk])


def _answers_of(documents: Documents, chunk: "np.ndarray") -> "np.ndarray":
    import numpy as np

    lengths, prompts = np.diff(documents.starts)[chunk], documents.prompts[chunk]
    counts = np.stack([prompts, lengths - prompts], axis=1).ravel()
    return np.repeat(np.tile([False, True], len(chunk)), counts)


def _write_array(path: Path, dtype: "np.dtype", length: int, parts: "Iterable[np.ndarray]") -> str:
    """Write an array part by part: a memory map would end the process on a full disk."""
    from numpy.lib import format as npy

    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    with ChecksumWriter(path) as stream:
        npy.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(part.astype(dtype, copy=False).tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    return stream.checksum


def _flushed(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())

# SPDX-License-Identifier: Apache-2.0
"""Folders of prepared data, and the format of packed datasets. A document of n + 1 tokens takes n places."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmb.base.trust import WORKLOADS
from llmb.catalogue.records import Record

if TYPE_CHECKING:
    import numpy as np


PREPARED = "checkpoint_and_dataset"


@dataclass(frozen=True, slots=True)
class PreparedFolders:
    """The paths of one workload's prepared files, all below ``path``; none of the files need exist."""

    path: Path

    @property
    def datasets(self) -> Path:
        return self.path / "datasets"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def hub(self) -> Path:
        """Return the default folder of Hugging Face's cache of downloads."""
        return self.path / "hub"

    @property
    def temporary(self) -> Path:
        """Return the folder for work in progress, which is unused once preparation has ended."""
        return self.path / "nemo_nlp_tmp"

    def dataset(self, name: str) -> Path:
        """Return the folder with ``{training,validation,test}.jsonl``, their indexes, and ``packed/``."""
        return self.datasets / name

    def packed(self, dataset: str, tokenizer: str, split: str, seq_len: int) -> Path:
        """Return the folder of a packed dataset. ``tokenizer`` is ``ORG/NAME`` or ``NAME``."""
        return self.dataset(dataset) / "packed" / tokenizer.replace("/", "--") / f"{split}_{seq_len}"

    def model(self, name: str) -> Path:
        """Return the folder of a checkpoint of llmb. ``name`` is ``ORG/NAME`` or ``NAME``."""
        return self.models / name


def prepared_folders(install: Path, workload: str) -> PreparedFolders:
    """Return the folders of ``workload`` below the install root ``install``."""
    return PreparedFolders(install / WORKLOADS / workload / PREPARED)


RECORD = "dataset.json"
TOKENS, ANSWERS, DOCUMENTS, PACKS = "tokens.npy", "answers.npy", "documents.npy", "packs.npy"
ARRAYS = (TOKENS, ANSWERS, DOCUMENTS, PACKS)
Split = Literal["training", "validation", "test"]
SPLITS: tuple[Split, ...] = ("training", "validation", "test")
Packer = Literal["first-fit-shuffle", "first-fit-decreasing"]


class TokenizerRecord(Record):
    """The tokenizer of a dataset. ``sha256`` is the checksum of its ``tokenizer.json``."""

    name: str
    sha256: str
    vocab_size: int
    bos_id: int | None
    eos_id: int


class PackedDataset(Record):
    """The content of ``dataset.json``. Counts are over all packs; ``places`` omits padding."""

    schema_version: Literal[1] = 1
    llmb_version: str
    prepared_at: str
    name: str
    """For example ``squad``."""
    source: str
    """The source of the samples: a repository with its revision, or a local file or folder with checksums."""
    split: Split
    template: str
    """Name and version of the prompt template."""
    tokenizer: TokenizerRecord
    seq_len: int
    documents: int
    left_out: int
    """Number of samples omitted because they have more than ``seq_len`` places."""
    packing: Packer = "first-fit-shuffle"
    """The algorithm that combined documents into packs."""
    packs: int
    places: int
    counted_labels: int
    longest_document: int
    """The length of the longest document, in places."""
    sum_of_squares: int
    """Sum of the squared lengths of all documents, in places."""
    files: dict[str, int]
    """Bytes of each array's file."""
    crc32: dict[str, str]

    @property
    def identity(self) -> str:
        """Return the name, split, length, tokenizer and checksum as text."""
        crc32 = self.crc32.get(TOKENS, "unknown")
        return f"{self.name} {self.split}, packed to {self.seq_len}, tokenizer {self.tokenizer.name}, CRC-32 {crc32}"

    @property
    def places_per_pack(self) -> float:
        return self.places / self.packs

    @property
    def squares_per_pack(self) -> float:
        return self.sum_of_squares / self.packs

    @property
    def fill(self) -> float:
        """Return the fraction of the places of all packs that documents fill."""
        return self.places / (self.packs * self.seq_len)


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """The arrays of a packed dataset, mapped into memory."""

    tokens: "np.ndarray"
    """uint32 [tokens]: all documents in sequence; the documents of a pack are adjacent."""
    answers: "np.ndarray"
    """bool [tokens]: True for the tokens of answers, which the loss counts as labels."""
    documents: "np.ndarray"
    """int64 [documents + 1]: the first token of each document, and the end of the last."""
    packs: "np.ndarray"
    """int64 [packs + 1]: the first document of each pack, and the end of the last."""


def incomplete_files(folder: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    """Describe each file that is missing, or has a size other than that in ``sizes`` (bytes)."""
    for name, size in sizes.items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            yield f"{name} is missing" if actual is None else f"{name} has {actual} of {size} bytes"


def map_arrays(folder: Path) -> PackedArrays:
    """Map the arrays in ``folder``. Raise OSError, ValueError or EOFError if one is missing or not an array."""
    import numpy as np

    return PackedArrays(*(np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ARRAYS))

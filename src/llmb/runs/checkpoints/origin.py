# SPDX-License-Identifier: Apache-2.0
"""The origin of a run's weights and data. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from llmb.catalogue.records import Record, Training

TITLES = {"squad": "SQuAD"}
"""Display names of datasets."""
IDENTITY_DIGITS = 16


class WeightsOrigin(Record):
    """The initial weights of a run (of the first run, if it resumes), or the weights that adapters belong to."""

    kind: Literal["random", "checkpoint", "unknown"]
    """``unknown``: the run resumes from a checkpoint that does not record the origin."""
    name: str | None = None
    """Name of the imported model or of the run that saved the checkpoint, or else a path."""
    path: str | None = None
    identity: str | None = None
    """Digest of the checkpoint's checksums; None without checksums."""

    @property
    def text(self) -> str:
        if self.kind == "unknown":
            return "not recorded by the checkpoint that the run resumes from"
        return "random" if self.kind == "random" else f"checkpoint {self.name}"


class DataOrigin(Record):
    """The data that a run trains on."""

    kind: Literal["synthetic", "dataset"]
    name: str
    """Name of a dataset, with its sequence length if known, or a description of synthetic data."""
    path: str | None = None
    identity: str | None = None
    """Digest of the checksums of the dataset's arrays."""
    source: str | None = None
    """The local file or folder that the dataset was prepared from, with checksums; None for other data."""

    @property
    def text(self) -> str:
        if self.kind == "synthetic":
            return f"synthetic {self.name}"
        return f"{self.name}, from {self.source}" if self.source else self.name

    @property
    def short(self) -> str:
        """Return a short text for a table column."""
        return "synthetic" if self.kind == "synthetic" else self.name


class Origin(Record):
    """The origin of a run's weights and data."""

    weights: WeightsOrigin
    data: DataOrigin

    @property
    def text(self) -> str:
        return f"weights: {self.weights.text}; data: {self.data.text}"

    def document(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "text": self.text}


def dataset_title(name: str, seq_len: int) -> str:
    """Return a string such as ``SQuAD packed 4096``."""
    return f"{TITLES.get(name, name)} packed {seq_len}"


def identity_of(crc32: Mapping[str, str] | None) -> str | None:
    """Return a digest that is equal for equal checksums; None without checksums."""
    if not crc32:
        return None
    listed = "".join(f"{name} {value}\n" for name, value in sorted(crc32.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:IDENTITY_DIGITS]


def synthetic_text(training: Training) -> str:
    """Describe the distribution of synthetic data."""
    mean = training.document_tokens
    if not mean:
        return training.data
    like = "lengths like SQuAD's, " if training.document_lengths == "squad" else ""
    return f"{training.data}, packed documents: {like}{mean} tokens on average"


class OriginHere(Record):
    """The origin of a run without options on this machine, and the reason if such a run would be rejected."""

    origin: Origin
    problem: str | None = None


def random_and_synthetic(training: Training) -> Origin:
    """Return the origin of a run with random weights and synthetic data."""
    data = DataOrigin(kind="synthetic", name=synthetic_text(training))
    return Origin(weights=WeightsOrigin(kind="random"), data=data)

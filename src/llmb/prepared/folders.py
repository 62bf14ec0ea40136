# SPDX-License-Identifier: Apache-2.0
"""Where prepared data and checkpoints are, with the folder names of the reference documents. Pure."""

from dataclasses import dataclass
from pathlib import Path

PREPARED = "checkpoint_and_dataset"
WORKLOADS = "workloads"


@dataclass(frozen=True, slots=True)
class PreparedFolders:
    """The prepared files of one workload, all below ``path``; nothing need exist."""

    path: Path

    @property
    def datasets(self) -> Path:
        return self.path / "datasets"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def hub(self) -> Path:
        """The hub's cache."""
        return self.path / "hub"

    @property
    def temporary(self) -> Path:
        """Work in progress; nothing in it is needed when preparation has ended."""
        return self.path / "nemo_nlp_tmp"

    def dataset(self, name: str) -> Path:
        """``training.jsonl``, ``validation.jsonl``, ``test.jsonl``, their indexes, and ``packed/``."""
        return self.datasets / name

    def packed(self, dataset: str, tokenizer: str, split: str, seq_len: int) -> Path:
        """A packed dataset (see ``packed_dataset``). ``tokenizer`` is ``ORG/NAME`` or a name."""
        return self.dataset(dataset) / "packed" / tokenizer.replace("/", "--") / f"{split}_{seq_len}"

    def model(self, name: str) -> Path:
        """A checkpoint of llmb: ``checkpoint.json``, ``weights/``, ``context/``. ``name`` is ``ORG/NAME`` or a name."""
        return self.models / name


def prepared_folders(install: Path, workload: str) -> PreparedFolders:
    """Folders of ``workload`` below the root of installation."""
    return PreparedFolders(install / WORKLOADS / workload / PREPARED)

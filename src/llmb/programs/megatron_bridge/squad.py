# SPDX-License-Identifier: Apache-2.0
"""SQuAD for the script's ``--data squad_packed``.

It reads ``training.jsonl`` and ``validation.jsonl`` of ``--dataset_root``, in the form in which llmb prepares them, and
packs them itself, with a tokenizer in Hugging Face's form (data/builders/hf_dataset.py, finetuning_dataset.py). Before,
its first rank loads the dataset ``squad`` (at v0.4.2, later ``rajpurkar/squad``) with the library ``datasets``, whose
content it then only uses for files that are missing. That would contact the hub, unless the working folder holds a
folder of this name, which ``datasets`` prefers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import find_workload
from llmb.prepared.folders import prepared_folders

PACKED = "squad_packed"
CONTEXT = "context"
TRAINING, VALIDATION, TOKENIZER = "training.jsonl", "validation.jsonl", "tokenizer.json"
WORKING_FOLDER = "data"
"""In the run folder."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# The arguments are the working folder and the training samples.
ENTER = (
    '[ "$RANK" != 0 ] || { mkdir -p "$1/squad" "$1/rajpurkar" && ln -sfn "$2" "$1/squad/train.jsonl" &&'
    ' ln -sfn ../squad "$1/rajpurkar/squad" && cd "$1"; } || exit 1; shift 2'
)
"""Shell text by which the first rank finds the dataset in its working folder."""


@dataclass(frozen=True, slots=True)
class Squad:
    """``root`` holds the samples, ``tokenizer`` is a folder."""

    root: Path
    tokenizer: Path

    @property
    def training(self) -> Path:
        return self.root / TRAINING

    def arguments(self) -> Iterator[tuple[str, str]]:
        """Names and values of the script's arguments."""
        yield "data", PACKED
        yield "dataset_root", str(self.root)
        yield "tokenizer_type", "HuggingFaceTokenizer"
        yield "tokenizer_model", str(self.tokenizer)


def prepared_squad(catalogue: Catalogue, recipe: Recipe, install: Path) -> Squad | None:
    """What was prepared for the recipe below ``install``; None if a file that the script needs is missing."""
    source = find_workload(catalogue, recipe.workload).sources.get(recipe.size)
    if source is None:
        return None
    folders = prepared_folders(install, recipe.workload)
    squad = Squad(folders.dataset(source.dataset), folders.model(source.model) / CONTEXT)
    needed = (squad.training, squad.root / VALIDATION, squad.tokenizer / TOKENIZER)
    return squad if all(path.is_file() for path in needed) else None

# SPDX-License-Identifier: Apache-2.0
"""What the reference suite's own preparation leaves in NeMo's form, for its launch scripts: what is there, and whole.

The folders are those of llmb's preparation, and the contents are not: NeMo reads no checkpoint of llmb, and the other
way round only by an import.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.checkpoints.checkpoint import RECORD
from llmb.checkpoints.nemo_folder import BACKEND_FILE, MODEL_FILE, is_nemo_folder
from llmb.checkpoints.prepared_data import PreparedFolders

NemoState = Literal["complete", "missing", "incomplete", "of llmb"]
COMMON_FILE = "weights/common.pt"
"""Written last by Megatron-Core, with the metadata (core/dist_checkpointing/serialization.py)."""
SAMPLES = ("training.jsonl", "validation.jsonl", "test.jsonl")


@dataclass(frozen=True, slots=True)
class NemoItem:
    """A checkpoint or a dataset as NeMo wants it."""

    name: str
    path: Path
    state: NemoState
    problem: str | None = None
    """What is wrong with what is there."""


def nemo_items(folders: PreparedFolders, model: str, dataset: str, seq_len: int) -> tuple[NemoItem, ...]:
    """The checkpoint ``model``, and ``dataset`` packed to ``seq_len`` with its tokenizer."""
    return _checkpoint(folders, model), _dataset(folders, model, dataset, seq_len)


def _checkpoint(folders: PreparedFolders, model: str) -> NemoItem:
    path, name = folders.model(model), f"models/{model}"
    if (path / RECORD).is_file():
        problem = "it is a checkpoint of llmb, which NeMo cannot read; each needs a root of installation of its own"
        return NemoItem(name, path, "of llmb", problem)
    if not is_nemo_folder(path):
        return NemoItem(name, path, "missing")
    if lacking := list(_lacking(path)):
        return NemoItem(name, path, "incomplete", f"without {', '.join(lacking)}: its import was ended")
    return NemoItem(name, path, "complete")


def _lacking(path: Path) -> Iterator[str]:
    yield from (name for name in (MODEL_FILE, BACKEND_FILE, COMMON_FILE) if not (path / name).is_file())
    shards = list((path / "weights").glob("*.distcp"))
    if not shards:
        yield "weights/*.distcp"
    yield from (f"content in weights/{shard.name}" for shard in shards if not shard.stat().st_size)


def _dataset(folders: PreparedFolders, model: str, dataset: str, seq_len: int) -> NemoItem:
    """NeMo packs while it trains, if it has to: the samples decide."""
    path, packed = folders.dataset(dataset), f"packed/{model.replace('/', '--')}"
    name = f"datasets/{dataset}"
    wanted = (*SAMPLES, f"{packed}/training_{seq_len}.npy", f"{packed}/{seq_len}_metadata.jsonl")
    lacking = [item for item in wanted if not (path / item).is_file()]
    if not lacking:
        return NemoItem(name, path, "complete")
    if set(SAMPLES) <= set(lacking):
        return NemoItem(name, path, "missing")
    return NemoItem(name, path, "incomplete", f"without {', '.join(lacking)}")

# SPDX-License-Identifier: Apache-2.0
"""Checks, before the first step, that a packed dataset is what the plan says and fits the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from pydantic import ValidationError

from llmb.checkpoints.checkpoint import dataset_problem, read_checkpoint_record
from llmb.checkpoints.checksums import damaged_files
from llmb.engine.parallel.mesh import Ranks
from llmb.errors import UsageError, itemized
from llmb.prepared.packed_dataset import RECORD, PackedArrays, PackedDataset, incomplete_files, map_arrays
from llmb.runs.plan import EnginePlan, TrainingDataset

KINDS = {"tokens": np.uint32, "answers": np.bool_, "documents": np.int64, "packs": np.int64}


def check_dataset(plan: EnginePlan, ranks: Ranks) -> None:
    """A collective. The first rank checks; raises UsageError on all ranks with all that is wrong."""
    shared: list[Any] = [list(dataset_problems(plan)) if ranks.is_first else None]
    dist.broadcast_object_list(shared, src=0, device=ranks.device)
    if shared[0]:
        raise UsageError(
            f"the dataset of this run cannot be used:{itemized(shared[0])}",
            where=plan.dataset.path if plan.dataset else None,
            do="prepare it again with 'llmb prepare dataset --force', or train on what the checkpoint was trained on",
        )


def dataset_problems(plan: EnginePlan) -> Iterator[str]:
    """What prevents the run from training on its data: the dataset's files, its sizes, or the checkpoint's dataset."""
    if plan.start and plan.start.consumed_samples:
        record = read_checkpoint_record(Path(plan.start.path))
        problem = dataset_problem(plan.dataset.packed if plan.dataset else None, record.dataset)
        yield from [problem] if problem else []
    if plan.dataset:
        yield from _size_problems(plan, plan.dataset.packed)
        yield from _folder_problems(plan.dataset, checksums=plan.verify_checkpoint)


def _size_problems(plan: EnginePlan, packed: PackedDataset) -> Iterator[str]:
    seq_len, vocab_size = plan.recipe.layout.seq_len, plan.recipe.model.vocab_size
    if packed.seq_len != seq_len:
        yield f"it is packed to sequences of {packed.seq_len} tokens, and the layout has sequences of {seq_len}"
    if packed.tokenizer.vocab_size > vocab_size:
        yield (
            f"the vocabulary of its tokenizer, {packed.tokenizer.name}, has {packed.tokenizer.vocab_size} tokens, "
            f"and the model's has {vocab_size}"
        )


def _folder_problems(dataset: TrainingDataset, *, checksums: bool) -> Iterator[str]:
    folder = Path(dataset.path)
    if incomplete := list(incomplete_files(folder, dataset.packed.files)):
        yield from incomplete
        return
    try:
        found = PackedDataset.model_validate_json((folder / RECORD).read_bytes())
        arrays = map_arrays(folder)
    except ValidationError as error:
        yield f"{RECORD} cannot be read: {error.errors()[0]['msg']}"
    except OSError as error:
        yield f"{error.strerror}: {error.filename}"
    except ValueError as error:
        yield f"an array cannot be read: {error}"
    else:
        if found != dataset.packed:
            yield "it was prepared again since the run was planned"
        problems = list(_array_problems(arrays, dataset.packed))
        if checksums and not problems:  # SQuAD packed to 4096 is 90 MB
            problems = list(damaged_files(folder, dataset.packed.crc32, threads=len(dataset.packed.crc32)))
        yield from problems


def _array_problems(arrays: PackedArrays, packed: PackedDataset) -> Iterator[str]:
    """Whether documents and packs are what the loader takes them for. Reads both, not the tokens."""
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
        yield f"there are {len(arrays.tokens)} tokens, and answers for {len(arrays.answers)}"
    elif (documents[0], documents[-1]) != (0, len(arrays.tokens)) or (np.diff(documents) < 2).any():
        yield "documents.npy does not divide the tokens into documents of at least two"
    elif (packs[0], packs[-1]) != (0, packed.documents) or (np.diff(packs) < 1).any():
        yield "packs.npy does not divide the documents into packs of at least one"
    elif (np.diff(documents[packs]) - np.diff(packs)).max() > packed.seq_len:
        yield f"a pack takes more than {packed.seq_len} places"

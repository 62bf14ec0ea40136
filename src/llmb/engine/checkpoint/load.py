# SPDX-License-Identifier: Apache-2.0
"""Loads and verifies checkpoints: the whole state, or the weights that a run starts from."""

import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from llmb.base.errors import UsageError
from llmb.base.shown_text import listed
from llmb.engine.checkpoint.state import (
    MODEL,
    RANDOM,
    PartsLoadPlanner,
    Places,
    optimizer_state,
    part_places,
    random_state,
    restore_random,
    trained_state,
)
from llmb.engine.model.adapter import is_of_adapter
from llmb.engine.optimizer import AdamW
from llmb.engine.parallel.exchange import Stages
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.engine.precision.apply import FP8
from llmb.readers.logs.step_line import LoadLine, format_load_line
from llmb.runs.checkpoints.checkpoint import (
    WEIGHTS,
    CheckpointTime,
    RankTransfer,
    Verified,
    checkpoint_time,
    damage_error,
    read_checkpoint_record,
)
from llmb.runs.checkpoints.checkpoint_files import damaged_files

MOST_THREADS = 8


def verify_checkpoint(path: Path, ranks: Ranks, on_block: Callable[[], object], *, wanted: bool) -> Verified:
    """Verify checksums if ``wanted``, and return the result. A collective; raises UsageError on all ranks for damaged
    files."""
    began = time.perf_counter()
    if not wanted:
        return _logged(Verified(verification="skipped"), ranks, f"{path} is not verified: skipped")
    checksums = read_checkpoint_record(path).crc32
    # Each rank's file is about as large as any other's.
    own = dict(sorted(checksums.items())[ranks.rank :: ranks.world_size])
    threads = min(torch.get_num_threads(), MOST_THREADS)
    files = of_every_rank(list(damaged_files(path, own, threads=threads, on_block=on_block)), ranks)
    if damaged := [line for of_rank in files for line in of_rank]:
        raise damage_error(path, damaged)
    took_s = round(time.perf_counter() - began, 3)
    text = f"{path} is verified: {len(checksums)} files in {took_s:.3f} s"
    return _logged(Verified(verification="verified", verify_s=took_s), ranks, text)


def _logged(verified: Verified, ranks: Ranks, text: str) -> Verified:
    if ranks.is_first:
        sys.stdout.write(f"llmb: {text}\n")
    return verified


def load_weights(path: Path, stages: Stages, ranks: Ranks) -> CheckpointTime:
    """Read all parameters except adapters; return the time it took. A collective; raises UsageError for missing or
    unreadable tensors."""
    each = [
        {f"{MODEL}{each.name}": each.values.detach() for each in stage.held() if not is_of_adapter(each.name)}
        for stage in stages
    ]
    return load_state(path, each, stages, ranks)[1]


ANOTHER = "pass another checkpoint"
BROKEN_PICKLE = (OSError, ValueError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError)
"""Exceptions from reading a damaged pickle: OSError, ``MetadataUnpickler``'s ValueError, and pickle's own."""


def torch_message(error: BaseException) -> str:
    """Return the message of the first rank that failed, or of the error, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = min(error.failures.items())[1][0]
    return " ".join(str(error).split()) or type(error).__name__


# The types that the metadata of a checkpoint of tensors consists of. BytesStorageMetadata is excluded on purpose: it
# describes objects, which torch would unpickle.
METADATA_TYPES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "bfloat16"),
        ("torch", "float16"),
        ("torch", "float32"),
        ("torch", "uint8"),
    }
)
PATH_NAMES = frozenset({("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")})
"""Types of pickled paths: in Python up to 3.12 and from 3.14 on, and in Python 3.13."""


def load_checkpoint(
    path: Path, stages: Stages, optimizers: Sequence[AdamW], ranks: Ranks, *, with_optimizer: bool = True
) -> CheckpointTime:
    """Restore weights, FP8 scales, optimizer and random states. A collective; raises UsageError if a tensor is missing
    or unreadable."""
    each = [
        trained_state(stage) | (optimizer_state(stage, optimizer) if with_optimizer else {})
        for stage, optimizer in zip(stages, optimizers, strict=True)
    ]
    state, took = load_state(path, [random_state(ranks.device), *each], stages, ranks)
    restore_random(state, ranks.device)
    return took


def load_state(
    path: Path, each: Sequence[Mapping[str, Tensor]], stages: Stages, ranks: Ranks
) -> tuple[dict[str, Tensor], CheckpointTime]:
    """Read a checkpoint into the tensors of ``each``, and round fp32 masters to parameters; return tensors and time."""
    start, began = time.time(), time.perf_counter()
    reader = TensorReader(path / WEIGHTS)
    state = read_state(reader, each, part_places(stages))
    for stage in stages:
        stage.round_masters()
    dist.barrier()
    took_s = time.perf_counter() - began
    mine = RankTransfer(rank=ranks.rank, size_bytes=reader.read_bytes, duration_s=reader.read_s)
    took = checkpoint_time("load", start, took_s, None, of_every_rank(mine, ranks))
    if ranks.is_first:
        sys.stdout.write(format_load_line(LoadLine(ranks.rank, took.start_s, took.duration_s)) + "\n")
    return state, took


def read_state(reader: "TensorReader", each: Sequence[Mapping[str, Tensor]], places: Places) -> dict[str, Tensor]:
    """Read a checkpoint into ``each`` and return all tensors by name. A collective; raises UsageError for missing or
    unreadable tensors."""
    path = Path(reader.path).parent
    saved = reader.read_metadata().state_dict_metadata
    wanted = {name: tensor for of_stage in each for name, tensor in of_stage.items()}
    # A generator that the saving run did not have, because it ran on another type of device, keeps its seed. FP8 scales
    # that it did not have, because it used no delayed scaling, keep their initial values.
    state = {name: value for name, value in wanted.items() if name in saved or not name.startswith((RANDOM, FP8))}
    if missing := sorted(state.keys() - saved.keys()):
        raise UsageError(f"the checkpoint lacks {listed(missing, 1)}", where=str(path), do=ANOTHER)
    try:
        load(state, storage_reader=reader, planner=PartsLoadPlanner(places))
    except CheckpointException as error:
        what = f"the checkpoint cannot be read: {torch_message(error)}"
        raise UsageError(what, where=str(path), do=ANOTHER) from error
    return wanted


class TensorReader(FileSystemReader):
    """Reads checkpoints of tensors. Unlike torch's reader, it unpickles only what ``MetadataUnpickler`` accepts."""

    read_bytes = 0
    read_s = 0.0
    """Bytes and seconds of this rank's reads; the seconds include the copies to the tensors."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        began = time.perf_counter()
        done = super().read_data(plan, planner)  # the future is complete
        self.read_s += time.perf_counter() - began
        self.read_bytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return done

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401, ARG002 (as torch declares it)
        with (Path(self.path) / ".metadata").open("rb") as stream:
            metadata = MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self.path}/.metadata contains no metadata")  # noqa: TRY004 (of a file, not an argument)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Accepts only ``types``, paths and the members of enums. writer: the program that saved the checkpoint."""

    types = METADATA_TYPES
    writer = "llmb"

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in PATH_NAMES:
            return PurePosixPath
        if (module, name) not in self.types:
            what = f"the checkpoint's metadata contains {module}.{name}, which no checkpoint of {self.writer} contains"
            raise ValueError(what)
        member: Callable[..., object] = super().find_class(module, name)
        return member


def _enum_member(owner: object, name: str) -> object:
    """Return an enum's member, which early versions of Python 3.11, such as Debian's, pickle as a ``getattr``."""
    if not isinstance(owner, EnumType):
        raise ValueError(f"the checkpoint's metadata takes {name} from {owner!r}, which is not an enum")  # noqa: TRY004 (of a file)
    return owner[name]

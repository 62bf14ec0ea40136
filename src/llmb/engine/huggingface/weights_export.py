# SPDX-License-Identifier: Apache-2.0
"""Converts the weights of a checkpoint to safetensors files."""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from llmb.engine.checkpoint.load import TensorReader
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.checkpoint.torch_errors import torch_message
from llmb.engine.huggingface.weights_import import MOST_PROBLEMS, parameter_shapes
from llmb.errors import EnvironmentProblem, UsageError
from llmb.huggingface.config import config_of
from llmb.huggingface.shards import CONFIG, INDEX, index_document, plan_shards, shard_files
from llmb.huggingface.tensors import Shape, hugging_face_name, hugging_face_shape
from llmb.runs.checkpoint import WEIGHTS
from llmb.runs.conversion import ExportJob, OnProgress
from llmb.runs.folder import write_atomically

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BROKEN = (OSError, ValueError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError)
"""The exceptions that reading a damaged pickle can raise, according to pickle's documentation."""


def export_weights(job: ExportJob, on_progress: OnProgress) -> None:
    """Writes weights, index and configuration to the job's folder, the tensors of one file in memory at a time.

    Raises UsageError if the checkpoint does not match its model.
    """
    folder, dtype = Path(job.folder), DTYPES[job.dtype]
    shapes = parameter_shapes(job.model)
    reader = CachedReader(Path(job.checkpoint) / WEIGHTS)
    check_complete(shapes, reader.metadata, job.checkpoint)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, job.largest_file_bytes)
    done, total = 0, sum(sizes.values())
    on_progress(done, total)
    for names, file in zip(shards, shard_files(len(shards)), strict=True):
        # Not bound to a name, so that they are freed before those of the next file are read.
        write_file(folder / file, read_tensors(reader, {name: shapes[name] for name in names}, dtype))
        done += sum(sizes[name] for name in names)
        on_progress(done, total)
    if len(shards) > 1:
        named = [[hugging_face_name(name) for name in names] for names in shards]
        index = index_document(named, {hugging_face_name(name): size for name, size in sizes.items()})
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_atomically(folder / CONFIG, json.dumps(config_of(job.model, job.dtype), indent=2) + "\n")


class CachedReader(TensorReader):
    """Reads the metadata once for many loads: reading that of a large run takes seconds."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.metadata = super().read_metadata()
        except BROKEN as error:
            raise UsageError(f"the checkpoint's metadata cannot be read: {error}", where=str(path)) from error

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002 (as torch declares it)
        return self.metadata


def check_complete(shapes: Mapping[str, Shape], metadata: Metadata, place: str) -> None:
    """Raises UsageError with every parameter that is missing or has another shape."""
    problems = []
    for name, shape in shapes.items():
        saved = metadata.state_dict_metadata.get(MODEL + name)
        if not isinstance(saved, TensorStorageMetadata):
            problems.append(f"{name} is missing")
        elif tuple(saved.size) != shape:
            problems.append(f"{name} has the shape {list(saved.size)}; its model has {list(shape)}")
    if problems:
        lines = "\n".join(f"  - {line}" for line in problems[:MOST_PROBLEMS])
        raise UsageError(f"the checkpoint does not match the weights of its model:\n{lines}", where=place)


def read_tensors(reader: TensorReader, shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Tensor]:
    """Full parameters in ``dtype``, by Hugging Face names and shapes; rounded to nearest if it is narrower."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    try:
        load({MODEL + name: tensor for name, tensor in tensors.items()}, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise UsageError(
            f"the checkpoint cannot be read: {torch_message(error)}", where=str(reader.path), do="export another one"
        ) from error
    return {
        hugging_face_name(name): tensor.view(hugging_face_shape(name, shapes[name])) for name, tensor in tensors.items()
    }


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Returns when the file is on disk. Raises EnvironmentProblem if it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors restricts it to its owner
        flush_file(path)
    except (SafetensorError, OSError) as error:
        advice = "free some space, or give a folder on another disk"
        raise EnvironmentProblem(f"{path.name} cannot be written: {error}", where=str(path), do=advice) from error


def flush_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())

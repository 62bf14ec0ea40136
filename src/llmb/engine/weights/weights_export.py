# SPDX-License-Identifier: Apache-2.0
"""Reads weights and adapters of a checkpoint, and converts them to safetensors files; imports adapters from peft."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from llmb.base.errors import EnvironmentProblem, UsageError, itemized
from llmb.catalogue.records import Lora
from llmb.engine.checkpoint.load import ANOTHER, BROKEN_PICKLE, TensorReader, torch_message
from llmb.engine.checkpoint.save import Writer
from llmb.engine.checkpoint.state import MODEL
from llmb.engine.weights.chunk_files import DTYPE_NAMES
from llmb.engine.weights.weights_import import AGAIN, not_finite, parameter_shapes
from llmb.runs.checkpoints.checkpoint import WEIGHTS
from llmb.runs.checkpoints.checkpoint_files import flush_file
from llmb.runs.checkpoints.conversion_request import (
    AdapterExportJob,
    AdapterImportJob,
    ExportJob,
    ImportedWeights,
    OnProgress,
)
from llmb.runs.folder import write_atomically
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.huggingface.tensors import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG,
    INDEX,
    Shape,
    WeightsFormat,
    adapted_layers,
    adapter_config,
    adapter_shapes,
    format_of,
    index_document,
    matrices_of_expert,
    matrix_names,
    peft_layers,
    peft_tensor,
    plan_shards,
    shard_files,
    stored_tensors,
    targets_of,
)

TRAINED = "pass the workload and size that the adapters were trained for, or other adapters"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_weights(job: ExportJob, on_progress: OnProgress) -> None:
    """Write weights, index and configuration. Raise UsageError for an unusable checkpoint, EnvironmentProblem or
    OSError if writing fails."""
    folder, dtype = Path(job.folder), DTYPES[job.dtype]
    shapes = parameter_shapes(job.model)
    reader = CachedReader(Path(job.checkpoint) / WEIGHTS)
    check_complete(shapes, reader.metadata, job.checkpoint)
    form, deltas = format_of(job.model), deltas_of(job, shapes)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, job.largest_file_bytes)
    done, total = 0, sum(sizes.values())
    on_progress(done, total)
    for names, file in zip(shards, shard_files(len(shards)), strict=True):
        # Not bound to a name, so that they are freed before those of the next file are read.
        wanted = {name: shapes[name] for name in names}
        write_file(folder / file, read_tensors(reader, wanted, dtype, form, deltas))
        done += sum(sizes[name] for name in names)
        on_progress(done, total)
    if len(shards) > 1:
        stored = {name: stored_tensors(name, shape, form) for name, shape in shapes.items()}
        named = [[tensor for name in names for tensor in stored[name]] for names in shards]
        index = index_document(named, sum(sizes.values()))
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    write_atomically(folder / CONFIG, json.dumps(config_of(job.model, job.dtype), indent=2) + "\n")


def deltas_of(job: ExportJob, shapes: Mapping[str, Shape]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute merged adapters' additions, by parameter; raise UsageError if one is unreadable."""
    if job.merged is None:
        return {}
    adapters = read_adapters(Path(job.merged.checkpoint), shapes, job.merged.lora)
    return {f"{layer}.weight": partial(adapter.delta, job.merged.lora) for layer, adapter in adapters.items()}


class LowRank(NamedTuple):
    """The matrices of one layer's adapter; layers that share A have equal ``a``."""

    a: Tensor
    b: Tensor

    def delta(self, lora: Lora) -> Tensor:
        """Return the matrix that the adapter adds to the layer's weight, [outputs, inputs] fp32."""
        return self.b @ self.a * lora.scale


def read_adapters(path: Path, shapes: Mapping[str, Shape], lora: Lora) -> dict[str, LowRank]:
    """Return a checkpoint's adapters in fp32, by layer; raise UsageError if one is missing or cannot be read."""
    wanted: dict[str, Tensor] = {}
    layers = adapted_layers(shapes, lora.targets)
    for layer in layers:
        sizes = adapter_shapes(shapes[f"{layer}.weight"], lora.rank)
        for matrix, name in matrix_names(layer, lora).items():
            wanted.setdefault(MODEL + name, torch.empty(sizes[matrix]))
    try:
        load(wanted, storage_reader=TensorReader(path / WEIGHTS), no_dist=True)
    except (CheckpointException, OSError) as error:
        what = f"the adapters cannot be read: {torch_message(error)}"
        raise UsageError(what, where=str(path), do=ANOTHER) from error
    names = {layer: matrix_names(layer, lora) for layer in layers}
    return {layer: LowRank(*(wanted[MODEL + names[layer][matrix]] for matrix in "AB")) for layer in layers}


class CachedReader(TensorReader):
    """Reads the metadata, which takes seconds for a large run, once for many loads; raises UsageError if that fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.metadata = super().read_metadata()
        except BROKEN_PICKLE as error:
            what = f"the checkpoint's metadata cannot be read: {error}"
            raise UsageError(what, where=str(path), do=ANOTHER) from error

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002 (as torch declares it)
        return self.metadata


def check_complete(shapes: Mapping[str, Shape], metadata: Metadata, place: str) -> None:
    """Raise UsageError if parameters are missing or have a different shape; the error lists all of them."""
    problems = []
    for name, shape in shapes.items():
        found = metadata.state_dict_metadata
        saved = found.get(MODEL + name)
        if not isinstance(saved, TensorStorageMetadata):
            problems.append(f"{name} is missing")
        elif tuple(saved.size) != shape:
            problems.append(f"{name} has the shape {list(saved.size)}; its model has {list(shape)}")
    if problems:
        what = f"the checkpoint does not match the weights of its model:{itemized(problems)}"
        raise UsageError(what, where=place, do=ANOTHER)


def read_tensors(
    reader: CachedReader,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    form: WeightsFormat,
    deltas: Mapping[str, Callable[[], Tensor]],
) -> dict[str, Tensor]:
    """Return parameters in ``dtype`` with Hugging Face's names and shapes; raise UsageError if one is unreadable or not
    finite."""
    dtypes = {name: torch.float32 if name in deltas else dtype for name in shapes}
    tensors = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    try:
        named = {MODEL + name: tensor for name, tensor in tensors.items()}
        load(named, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise UsageError(
            f"the checkpoint cannot be read: {torch_message(error)}", where=str(reader.path), do=ANOTHER
        ) from error
    tensors |= {name: (tensors[name] + deltas[name]()).to(dtype) for name in deltas.keys() & tensors.keys()}
    if spoiled := next((name for name, tensor in tensors.items() if not_finite(tensor)), None):
        larger = "pass --dtype fp32 if the values are merely too large for bf16; otherwise pass another checkpoint"
        what = f"{spoiled} has values that are not finite in {DTYPE_NAMES[dtype]}"
        raise UsageError(what, where=str(reader.path), do=ANOTHER if dtype is torch.float32 else larger)
    return {stored: part for name, tensor in tensors.items() for stored, part in stored_parts(name, tensor, form)}


def stored_parts(name: str, tensor: Tensor, form: WeightsFormat) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that form a parameter in Hugging Face's format, with their names."""
    stored = stored_tensors(name, tuple(tensor.shape), form)
    matrices = len(matrices_of_expert(name, form))
    if matrices:
        parts = tensor.view(*tensor.shape[:2], matrices, tensor.shape[-1]).transpose(1, 2).flatten(0, 1).mT
    else:
        parts = tensor.unsqueeze(0)
    for (other, shape), part in zip(stored.items(), parts, strict=True):
        yield other, part.contiguous().view(shape)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file and return once it is on disk; raise EnvironmentProblem if it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors restricts it to its owner
        flush_file(path)
    except (SafetensorError, OSError) as error:
        advice = "free some space, or use a folder on another disk"
        raise EnvironmentProblem(f"{path.name} cannot be written: {error}", where=str(path), do=advice) from error


def export_adapters(job: AdapterExportJob) -> None:
    """Write peft's files; raise UsageError for unusable adapters, EnvironmentProblem or OSError if writing fails."""
    folder, shapes = Path(job.folder), parameter_shapes(job.model)
    adapters = read_adapters(Path(job.checkpoint), shapes, job.lora)
    if spoiled := next((layer for layer, part in adapters.items() if any(map(not_finite, part))), None):
        raise UsageError(f"the adapter of {spoiled} has values that are not finite", where=job.checkpoint, do=ANOTHER)
    names = peft_layers(adapters, format_of(job.model))
    # A shared A is written for each of its layers: a safetensors file has no references.
    tensors = {
        peft_tensor(names[layer], matrix): values.clone()
        for layer, adapter in adapters.items()
        for matrix, values in zip("AB", adapter, strict=True)
    }
    write_file(folder / ADAPTER_FILE, tensors)
    config = adapter_config(job.lora, job.model, job.base)
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def import_adapters(job: AdapterImportJob) -> ImportedWeights:
    """Write ``weights`` from peft's file. Raise UsageError if its adapters are unusable or unsupported,
    CheckpointException if writing fails."""
    path, shapes = Path(job.source) / ADAPTER_FILE, parameter_shapes(job.model)
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        what = f"{path.name} is not a complete safetensors file: {error}"
        raise UsageError(what, where=str(path), do=AGAIN) from error
    lora, adapters = read_peft(stored, shapes, job)
    state: dict[str, Tensor] = {}
    for layer, adapter in adapters.items():
        for matrix, name in matrix_names(layer, lora).items():
            state[MODEL + name] = adapter.a if matrix == "A" else adapter.b
    writer = Writer(Path(job.folder) / WEIGHTS)
    save(state, storage_writer=writer, no_dist=True)
    return ImportedWeights(checksums=writer.checksums, dtypes=("fp32",), lora=lora)


def read_peft(
    stored: Mapping[str, Tensor], shapes: Mapping[str, Shape], job: AdapterImportJob
) -> tuple[Lora, dict[str, LowRank]]:
    """Return the description of peft's adapters, and the adapters in fp32; raise UsageError if they are unusable."""
    names = peft_layers(adapted_layers(shapes, "all-linear"), format_of(job.model))
    ours = {theirs: layer for layer, theirs in names.items()}
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, values in stored.items():
        theirs, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        if theirs not in ours or matrix not in ("A", "B"):
            what = f"{name} is not an adapter of a layer of {job.model.model} {job.model.size}"
            raise UsageError(what, where=job.source, do=TRAINED)
        matrices.setdefault(ours[theirs], {})[matrix] = values.float()
    if problems := list(shape_problems(matrices, shapes, job.rank)):
        what = f"the adapters do not match {job.model.model} {job.model.size}:{itemized(problems)}"
        raise UsageError(what, where=job.source, do=TRAINED)
    adapters = {layer: LowRank(parts["A"], parts["B"]) for layer, parts in sorted(matrices.items())}
    targets = targets_of({layer.rpartition(".")[2] for layer in matrices}, shared=has_shared_inputs(adapters))
    if targets is None or set(adapted_layers(shapes, targets)) != set(matrices):
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in matrices}))
        raise UsageError(
            f"adapters of {kinds} (layers: {len(matrices)}) are not supported",
            where=job.source,
            do="pass adapters of the same layers in all blocks: q_proj and v_proj; q_proj, k_proj and v_proj; these "
            "three and o_proj; or all linear layers",
        )
    return Lora(rank=job.rank, alpha=job.alpha, dropout=job.dropout, targets=targets), adapters


def shape_problems(
    adapters: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape], rank: int
) -> Iterator[str]:
    for layer, parts in adapters.items():
        for matrix, shape in adapter_shapes(shapes[f"{layer}.weight"], rank).items():
            if matrix not in parts:
                yield f"{layer} has no lora_{matrix}"
            elif tuple(parts[matrix].shape) != shape:
                yield f"lora_{matrix} of {layer} has the shape {list(parts[matrix].shape)}, not {list(shape)}"
            elif not_finite(parts[matrix]):
                yield f"lora_{matrix} of {layer} has values that are not finite"


def has_shared_inputs(adapters: Mapping[str, LowRank]) -> bool:
    """Return True if all adapters within each module have an equal matrix A, as in a fused projection."""
    first: dict[str, Tensor] = {}
    return all(
        torch.equal(first.setdefault(layer.rpartition(".")[0], adapter.a), adapter.a)
        for layer, adapter in adapters.items()
    )

# SPDX-License-Identifier: Apache-2.0
"""Converts safetensors files, or a checkpoint of NeMo, to the weights of a checkpoint, in the stored dtypes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from llmb.base.errors import UsageError, itemized
from llmb.base.shown_text import listed
from llmb.catalogue.records import Model
from llmb.engine.checkpoint.load import BROKEN_PICKLE, METADATA_TYPES, MetadataUnpickler, torch_message
from llmb.engine.model.decoder import EMBEDDING, build_model
from llmb.engine.weights.chunk_files import CHUNK_BYTES, Chunk, ChunkSource, Parameter, chunks_of, write_checkpoint
from llmb.runs.checkpoints.checkpoint import WEIGHTS
from llmb.runs.checkpoints.conversion_request import ImportedWeights, ImportJob, OnNote, OnProgress
from llmb.runs.checkpoints.nemo_folder import CONVERT, METADATA_FILE
from llmb.runs.huggingface.tensors import (
    HEAD_WEIGHT,
    Match,
    Shape,
    StoredTensor,
    WeightsFormat,
    format_of,
    match_tensors,
    matrices_of_expert,
)

AGAIN = "download or copy the file again, or pass other weights"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """The tensors of safetensors files in ``folder``, read chunk by chunk on request."""

    folder: Path
    stored: dict[str, StoredTensor]

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Return rows ``first`` to ``end`` (exclusive) in the stored dtype; raise UsageError if unreadable or not
        finite."""
        file = self.stored[name].file
        try:
            with safe_open(self.folder / file, framework="pt") as content:
                part: Tensor = content.get_slice(name)[first:end].clone()  # so that the map of the file is freed
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{name} in {file} cannot be read: {error}", do=AGAIN) from error
        if not_finite(part):
            raise UsageError(f"{name} in {file} has values that are not finite (NaN or infinite)", do=AGAIN)
        return part

    def whole(self, name: str) -> Tensor:
        return self.rows(name, 0, self.stored[name].shape[0])


def not_finite(values: Tensor) -> bool:
    """Return True if a value is NaN or infinite, without a temporary tensor: minimum and maximum propagate NaN."""
    return values.numel() > 0 and not all(math.isfinite(extreme.item()) for extreme in values.aminmax())


def open_files(folder: Path, names: Sequence[str]) -> SafetensorsFiles:
    """Read the headers of files; raise UsageError if one is unreadable or incomplete, or two have the same tensor."""
    stored: dict[str, StoredTensor] = {}
    for file in names:
        for name, tensor in _read_header(folder, file).items():
            if name in stored:
                what = f"{name} is in two files: {stored[name].file} and {file}"
                raise UsageError(what, where=str(folder), do="download or save the model again")
            stored[name] = tensor
    return SafetensorsFiles(folder, stored)


def _read_header(folder: Path, file: str) -> dict[str, StoredTensor]:
    """Read a file's header, which the library compares with the size of the file."""
    try:
        with safe_open(folder / file, framework="pt") as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 (the library's file has no other iterator)
            return {name: StoredTensor(file, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        what = f"{file} is not a complete safetensors file: {error}"
        raise UsageError(what, where=str(folder / file), do=AGAIN) from error


Part = Literal["whole", "query", "key", "value", "gate", "up"]
PREFIXES = ("module.", "")
LAYER, LAYERS = "layers.", "decoder.layers."
LEFT_OUT = ("_extra_state", "optimizer.", "rng_state", "rerun_state", "chained_")
"""Substrings of the names of tensors that are not weights."""
NEMO_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METADATA_CLASS = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
NEMO_TYPES = METADATA_TYPES | {("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")}
"""The types that NeMo's metadata may contain; it also describes objects, which are never read."""


class NemoTensor(NamedTuple):
    """The name of the tensor that contains a parameter, and the part of the tensor that is the parameter."""

    name: str
    part: Part


OUTSIDE = {
    "embed_tokens.weight": NemoTensor("embedding.word_embeddings.weight", "whole"),
    "norm.weight": NemoTensor("decoder.final_layernorm.weight", "whole"),
    "lm_head.weight": NemoTensor("output_layer.weight", "whole"),
}
IN_LAYER = {
    "input_layernorm.weight": NemoTensor("self_attention.linear_qkv.layer_norm_weight", "whole"),
    "self_attn.q_proj.weight": NemoTensor("self_attention.linear_qkv.weight", "query"),
    "self_attn.k_proj.weight": NemoTensor("self_attention.linear_qkv.weight", "key"),
    "self_attn.v_proj.weight": NemoTensor("self_attention.linear_qkv.weight", "value"),
    "self_attn.o_proj.weight": NemoTensor("self_attention.linear_proj.weight", "whole"),
    "post_attention_layernorm.weight": NemoTensor("mlp.linear_fc1.layer_norm_weight", "whole"),
    "mlp.gate_proj.weight": NemoTensor("mlp.linear_fc1.weight", "gate"),
    "mlp.up_proj.weight": NemoTensor("mlp.linear_fc1.weight", "up"),
    "mlp.down_proj.weight": NemoTensor("mlp.linear_fc2.weight", "whole"),
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Names of tensors with a row per token of the vocabulary, which may be padded with further rows."""


class NemoSource(NamedTuple):
    """The place of a parameter: in tensor ``name``, at index ``layer`` if the tensor stacks all layers."""

    name: str
    layer: int | None
    part: Part


class NemoUnpickler(MetadataUnpickler):
    """Reads Megatron-Core's metadata class as torch's ``Metadata``, so that Megatron-Core is not required."""

    types = NEMO_TYPES
    writer = "NeMo"

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (as pickle declares it)
        return Metadata if (module, name) == METADATA_CLASS else super().find_class(module, name)


@dataclass(frozen=True, slots=True)
class NemoParameters:
    """The parameters of a model in a NeMo 2 checkpoint; the tensor read last is cached."""

    folder: Path
    heads: int
    groups: int
    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, _StorageInfo]
    sources: dict[str, NemoSource]
    parameters: dict[str, Parameter]
    last: dict[tuple[str, int | None], Tensor] = field(default_factory=dict)

    def read(self, chunk: Chunk) -> Tensor:
        """Return rows of a parameter in its stored dtype; raise UsageError if they are unreadable or not finite."""
        source = self.sources[chunk.name]
        rows = self._part(self._tensor(source.name, source.layer), source.part)[chunk.first : chunk.end].clone()
        if not_finite(rows):
            raise UsageError(f"{source.name} has values that are not finite (NaN or infinite)", do=AGAIN)
        return rows

    def _part(self, tensor: Tensor, part: Part) -> Tensor:
        if part == "whole":
            return tensor
        if part in ("gate", "up"):
            return tensor.chunk(2)[part == "up"]
        queries = self.heads // self.groups
        by_group = tensor.view(self.groups, queries + 2, -1, tensor.shape[-1])
        first, end = {"query": (0, queries), "key": (queries, queries + 1), "value": (queries + 1, queries + 2)}[part]
        return by_group[:, first:end].reshape(-1, tensor.shape[-1])

    def _tensor(self, name: str, layer: int | None) -> Tensor:
        if (name, layer) not in self.last:
            self.last.clear()
            self.last[name, layer] = self._read(name, layer)
        return self.last[name, layer]

    def _read(self, name: str, layer: int | None) -> Tensor:
        stored = self.tensors[name]
        shape = stored.size if layer is None else stored.size[1:]
        whole = torch.empty(shape, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            if layer is not None and not chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
                continue
            values = self._chunk(name, chunk)
            if layer is None:
                whole[_box(chunk, 0)] = values
            else:
                whole[_box(chunk, 1)] = values[layer - chunk.offsets[0]]
        return whole

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self.places[MetadataIndex(name, chunk.offsets)]
        try:
            with (self.folder / place.relative_path).open("rb") as stream:
                view = cast(IO[bytes], _create_file_view(stream, place.offset, place.length))
                values: Tensor = torch.load(view, map_location="cpu", weights_only=True)
        except (RuntimeError, *BROKEN_PICKLE) as error:
            what = f"{name} in {place.relative_path} cannot be read: {torch_message(error)}"
            raise UsageError(what, do=AGAIN) from error
        return values.view(chunk.sizes)


def _box(chunk: ChunkStorageMetadata, first: int) -> tuple[slice, ...]:
    corners = list(zip(chunk.offsets, chunk.sizes, strict=True))
    return tuple(slice(offset, offset + size) for offset, size in corners[first:])


def open_nemo(path: Path, model: Model, shapes: Mapping[str, Shape]) -> tuple[NemoParameters, tuple[str, ...]]:
    """Return a NeMo checkpoint's parameters and names of skipped tensors; raise UsageError if it is damaged or does
    not match."""
    metadata = _read_metadata(path / METADATA_FILE)
    tensors = {
        name: item for name, item in metadata.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)
    }
    left_out = tuple(name for name in metadata.state_dict_metadata if any(part in name for part in LEFT_OUT))
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}{OUTSIDE['norm.weight'].name}" in tensors), PREFIXES[0])
    stacked = f"{prefix}{LAYERS}{IN_LAYER['input_layernorm.weight'].name}" in tensors
    sources = {name: source_of(name, prefix, stacked=stacked) for name in shapes}
    problems = list(_problems(model, shapes, sources, tensors))
    unknown = tensors.keys() - {source.name for source in sources.values()} - set(left_out)
    problems += [f"{name} is not a tensor of this model" for name in sorted(unknown)]
    problems = problems or list(_damage(path / WEIGHTS, metadata, {source.name for source in sources.values()}))
    if problems:
        what = f"the NeMo checkpoint does not match the weights of {model.model} {model.size}:{itemized(problems)}"
        raise UsageError(what, where=str(path), do=CONVERT)
    return (
        NemoParameters(
            folder=path / WEIGHTS,
            heads=model.attention_heads,
            groups=model.kv_heads,
            tensors={source.name: tensors[source.name] for source in sources.values()},
            places=dict(metadata.storage_data),
            sources=sources,
            parameters={
                name: Parameter(shape, tensors[sources[name].name].properties.dtype) for name, shape in shapes.items()
            },
        ),
        left_out,
    )


def source_of(name: str, prefix: str, *, stacked: bool) -> NemoSource:
    """Return the tensor that contains the engine's parameter ``name``, and which part of the tensor it is."""
    if name in OUTSIDE:
        return NemoSource(prefix + OUTSIDE[name].name, None, OUTSIDE[name].part)
    layer, _, inside = name.removeprefix(LAYER).partition(".")
    stored = IN_LAYER[inside]
    if stacked:
        return NemoSource(f"{prefix}{LAYERS}{stored.name}", int(layer), stored.part)
    return NemoSource(f"{prefix}{LAYERS}{layer}.{stored.name}", None, stored.part)


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as stream:
            metadata = NemoUnpickler(stream).load()
    except BROKEN_PICKLE as error:
        raise UsageError(f"the metadata cannot be read: {error}", where=str(path), do=CONVERT) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UsageError("the file contains no checkpoint metadata", where=str(path), do=CONVERT)
    return metadata


def _problems(
    model: Model,
    shapes: Mapping[str, Shape],
    sources: Mapping[str, NemoSource],
    tensors: Mapping[str, TensorStorageMetadata],
) -> Iterator[str]:
    fused = {"query": (model.attention_heads + 2 * model.kv_heads) * model.head_dim, "gate": 2 * model.ffn_hidden_size}
    for name, source in sources.items():
        if source.part not in ("whole", *fused):
            continue  # a part of a tensor that was compared for another part
        stored = tensors.get(source.name)
        if stored is None:
            yield f"{source.name} is missing"
            continue
        rows = (fused.get(source.part, shapes[name][0]), *shapes[name][1:])
        expected = rows if source.layer is None else (model.layers, *rows)
        if not _fits(tuple(stored.size), expected, padded=source.name.endswith(VOCABULARY)):
            yield f"{source.name} has the shape {list(stored.size)}; the model has {list(expected)}"
        if stored.properties.dtype not in NEMO_DTYPES:
            yield f"{source.name} is {stored.properties.dtype}; supported are {', '.join(map(str, NEMO_DTYPES))}"
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            yield f"{source.name} is not covered by its chunks"


def _fits(shape: Shape, expected: Shape, *, padded: bool) -> bool:
    return shape == expected or (padded and shape[0] >= expected[0] and shape[1:] == expected[1:])


def _damage(folder: Path, metadata: Metadata, names: Collection[str]) -> Iterator[str]:
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        if index.fqn not in names:
            continue
        if getattr(place, "transform_descriptors", None):
            yield f"{index.fqn} is compressed"
        path = folder / place.relative_path
        if path.parent != folder:
            yield f"{index.fqn} is outside of the folder, in {place.relative_path}"
            continue
        size = sizes.setdefault(path.name, path.stat().st_size if path.is_file() else -1)
        if size < place.offset + place.length:
            problem = f"has {size} bytes, and {index.fqn} ends at {place.offset + place.length}"
            yield f"{path.name} {'is missing' if size < 0 else problem}"


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Return names and shapes of the full model's parameters, without allocating memory."""
    with torch.device("meta"):
        decoder: nn.Module = build_model(model)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


@dataclass(frozen=True, slots=True)
class HuggingFaceParameters:
    """The parameters of a model in safetensors files, read chunk by chunk."""

    files: SafetensorsFiles
    sources: dict[str, tuple[str, ...]]
    """The names of the stored tensors that form each parameter, in order."""
    form: WeightsFormat
    parameters: dict[str, Parameter]

    def read(self, chunk: Chunk) -> Tensor:
        """Return rows of a parameter in its dtype; raise UsageError if they are unreadable or not finite."""
        matrices = len(matrices_of_expert(chunk.name, self.form))
        rows = read_rows(self.files, self.sources[chunk.name], matrices, chunk)
        parameter = self.parameters[chunk.name]
        return rows.to(parameter.dtype).reshape(-1, *parameter.shape[1:])


def import_weights(job: ImportJob, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights:
    """Write ``weights``. Raise UsageError for unusable files, EnvironmentProblem if writing fails, RunFailed if a
    process is killed."""
    if job.format == "nemo":
        nemo, left_out = open_nemo(Path(job.source), job.model, parameter_shapes(job.model))
        return _written(job, nemo, left_out, on_progress, on_note)
    shapes, form = parameter_shapes(job.model), format_of(job.model)
    files = open_files(Path(job.source), job.files)
    match = match_tensors(shapes, files.stored, form, tied=job.model.tied_embeddings)
    if match.problems:
        raise mismatch(job, match.problems)
    if HEAD_WEIGHT in match.left_out and (differences := list(head_differences(files, match))):
        raise mismatch(job, differences)
    parameters = {name: Parameter(shape, stored_dtype(files, match.sources[name])) for name, shape in shapes.items()}
    source = HuggingFaceParameters(files, match.sources, form, parameters)
    return _written(job, source, match.left_out, on_progress, on_note)


def _written(
    job: ImportJob, source: ChunkSource, left_out: Sequence[str], on_progress: OnProgress, on_note: OnNote
) -> ImportedWeights:
    imported = write_checkpoint(job, source, on_progress, on_note)
    if left_out:
        on_note(f"tensors that the model does not have are skipped: {listed(left_out, 3)}")
    return imported


def stored_dtype(files: SafetensorsFiles, sources: Sequence[str]) -> torch.dtype:
    """Return the dtype of a parameter's tensors, or one that can hold all values if they differ."""
    return reduce(torch.promote_types, {DTYPES[files.stored[name].dtype] for name in sources})


def head_differences(files: SafetensorsFiles, match: Match) -> Iterator[str]:
    """Yield a problem if the stored head differs from the embedding that the model ties it to."""
    (embedding,) = match.sources[EMBEDDING]
    shape, copied = (files.stored[name].shape for name in (embedding, HEAD_WEIGHT))
    equal = shape == copied and all(
        torch.equal(*(files.rows(name, chunk.first, chunk.end).float() for name in (embedding, HEAD_WEIGHT)))
        for chunk in chunks_of(embedding, Parameter(shape, torch.float32), CHUNK_BYTES)
    )
    if not equal:
        yield f"{HEAD_WEIGHT} is not equal to {embedding}, though the model ties them"


def mismatch(job: ImportJob, problems: Sequence[str]) -> UsageError:
    what = f"the files do not match the weights of {job.model.model} {job.model.size}:{itemized(problems)}"
    return UsageError(what, where=job.source, do="pass the weights' workload and size, or weights of this model")


def read_rows(files: SafetensorsFiles, sources: Sequence[str], matrices: int, chunk: Chunk) -> Tensor:
    """Return a chunk's rows. ``matrices``: tensors, [outputs, inputs], per row; 0 if one tensor contains all rows."""
    if not matrices:
        return files.rows(sources[0], chunk.first, chunk.end)
    return torch.stack(
        [
            torch.stack([files.whole(name).T for name in sources[row * matrices : (row + 1) * matrices]], dim=1)
            for row in range(chunk.first, chunk.end)
        ]
    )

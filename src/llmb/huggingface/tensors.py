# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a model's parameters in Hugging Face files, their division into files, and a check. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmb.errors import UsageError
from llmb.huggingface.formats import WeightsFormat

Shape = tuple[int, ...]

READABLE = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of safetensors that convert to fp32 without loss, with their bytes per element."""

HEAD = "lm_head."
HEAD_WEIGHT = "lm_head.weight"
DECODER = "model."
LANGUAGE_MODEL = "language_model."
"""Prefix of every name of the text model if a Llama 4 model has a vision part."""
VISION = ("vision_model.", "multi_modal_projector.")
ROTARY_TABLE = ".rotary_emb.inv_freq"
"""Computed from the configuration; old versions of transformers saved it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Match:
    """The stored tensors of each parameter, tensors that are left out, and all problems that prevent the import."""

    sources: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]


def hugging_face_name(name: str, form: WeightsFormat) -> str:
    for ours, theirs in form.names.items():
        if ours in name:
            name = name.replace(ours, theirs)
            break
    return name if name.startswith(HEAD) else DECODER + name


def hugging_face_shape(name: str, shape: Shape) -> Shape:
    """Gate and up of stacked experts are stored in one dimension, gate first: [experts, hidden, 2 x ffn]."""
    if name.endswith(".experts.gate_up_proj"):
        return (*shape[:-2], shape[-2] * shape[-1])
    return shape


def matrices_of_expert(name: str, form: WeightsFormat) -> tuple[str, ...]:
    """Names of each expert's tensors of a stacked parameter; none if the format stacks experts, too."""
    return form.expert_matrices.get(name.rpartition(".")[2], ())


def stored_tensors(name: str, shape: Shape, form: WeightsFormat) -> dict[str, Shape]:
    """The tensors that hold a parameter, with their shapes; those of experts in order, each [outputs, inputs]."""
    stored, matrices = hugging_face_name(name, form), matrices_of_expert(name, form)
    if not matrices:
        return {stored: hugging_face_shape(name, shape)}
    experts, inputs, outputs = shape[0], shape[1], shape[-1]
    above = stored.rpartition(".")[0]
    return {f"{above}.{e}.{matrix}.weight": (outputs, inputs) for e in range(experts) for matrix in matrices}


def match_tensors(
    parameters: Mapping[str, Shape], found: Mapping[str, StoredTensor], form: WeightsFormat, *, tied: bool = False
) -> Match:
    """Finds every parameter, given with its shape, among the stored tensors. None may be missing or unknown.

    ``tied``: a head that is stored beside the embedding is not a parameter.
    """
    multimodal = any(name.startswith(LANGUAGE_MODEL) for name in found)
    prefix = LANGUAGE_MODEL if multimodal else ""
    wanted = {
        name: {prefix + stored: needed for stored, needed in stored_tensors(name, shape, form).items()}
        for name, shape in parameters.items()
    }
    known = {stored for tensors in wanted.values() for stored in tensors}
    left_out = tuple(name for name in found if _can_be_left_out(name, multimodal=multimodal, tied=tied))
    unknown = found.keys() - known - set(left_out)
    problems = [
        problem
        for tensors in wanted.values()
        for stored, needed in tensors.items()
        for problem in _problems(stored, needed, found)
    ]
    problems += [f"{name} is not a tensor of this model" for name in sorted(unknown)]
    return Match({name: tuple(tensors) for name, tensors in wanted.items()}, left_out, tuple(problems))


def _can_be_left_out(name: str, *, multimodal: bool, tied: bool) -> bool:
    if tied and name == HEAD_WEIGHT:
        return True
    return name.endswith(ROTARY_TABLE) or (multimodal and name.startswith(VISION))


def _problems(name: str, shape: Shape, found: Mapping[str, StoredTensor]) -> Iterator[str]:
    stored = found.get(name)
    if stored is None:
        yield f"{name} is missing"
        return
    if stored.shape != shape:
        yield f"{name} has the shape {list(stored.shape)}; the model has {list(shape)}"
    if stored.dtype not in READABLE:
        yield f"{name} is {stored.dtype}; supported are {', '.join(READABLE)}"


SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB; units are powers of ten. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", text.strip(), re.IGNORECASE)
    size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"'{text}' is not a size", do="give a number and a unit (B, KB, MB, GB, TB), such as 5GB")
    return size


def plan_shards(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Names of tensors by file, in order. A file has at most ``largest`` bytes of tensors, or holds a single tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = largest
        shards[-1].append(name)
        room -= size
    return shards


def shard_files(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_document(shards: Sequence[Sequence[str]], total_bytes: int) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json``."""
    files = shard_files(len(shards))
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}

# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a model's parameters in Hugging Face files, and a check that files hold them all. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]

READABLE = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of safetensors that convert to fp32 without loss, with their bytes per element."""

HEAD = "lm_head."
DECODER = "model."
LANGUAGE_MODEL = "language_model."
"""Prefix of every name of the text model if a Llama 4 model has a vision part."""
VISION = ("vision_model.", "multi_modal_projector.")
ROTARY_TABLE = ".rotary_emb.inv_freq"
"""Computed from the configuration; old versions of transformers saved it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file."""

    file: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Match:
    """The stored tensor of each parameter, tensors that are left out, and all problems that prevent the import."""

    sources: dict[str, str]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]


def hugging_face_name(name: str) -> str:
    return name if name.startswith(HEAD) else DECODER + name


def hugging_face_shape(name: str, shape: Shape) -> Shape:
    """Gate and up of stacked experts are stored in one dimension, gate first: [experts, hidden, 2 x ffn]."""
    if name.endswith(".experts.gate_up_proj"):
        return (*shape[:-2], shape[-2] * shape[-1])
    return shape


def match_tensors(parameters: Mapping[str, Shape], found: Mapping[str, Stored]) -> Match:
    """Finds every parameter, given with its shape, among the stored tensors. None may be missing or unknown."""
    multimodal = any(name.startswith(LANGUAGE_MODEL) for name in found)
    stored_name = {name: (LANGUAGE_MODEL if multimodal else "") + hugging_face_name(name) for name in parameters}
    left_out = tuple(name for name in found if _can_be_left_out(name, multimodal=multimodal))
    unknown = found.keys() - set(stored_name.values()) - set(left_out)
    problems = [problem for name, shape in parameters.items() for problem in _problems(name, shape, stored_name, found)]
    problems += [f"{name} is not a tensor of this model" for name in sorted(unknown)]
    return Match(stored_name, left_out, tuple(problems))


def _can_be_left_out(name: str, *, multimodal: bool) -> bool:
    return name.endswith(ROTARY_TABLE) or (multimodal and name.startswith(VISION))


def _problems(name: str, shape: Shape, stored_name: dict[str, str], found: Mapping[str, Stored]) -> Iterator[str]:
    stored = found.get(stored_name[name])
    if stored is None:
        yield f"{stored_name[name]} is missing"
        return
    wanted = hugging_face_shape(name, shape)
    if stored.shape != wanted:
        yield f"{stored_name[name]} has the shape {list(stored.shape)}; the model has {list(wanted)}"
    if stored.dtype not in READABLE:
        yield f"{stored_name[name]} is {stored.dtype}; supported are {', '.join(READABLE)}"

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's formats of models and adapters: their files, and the names and shapes of their tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from llmb.base.errors import UsageError, itemized
from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import ADAPTED, Lora, LoraTargets, Model, Record

Parts = Mapping[str, object]
"""Required values of a model's fields, by name, such as ``moe.router``; None if the model must lack the field."""


def part(model: Model, name: str) -> object:
    """Return a field of ``model``; None if it belongs to a part that the model lacks."""
    value: object = model
    for step in name.split("."):
        value = getattr(value, step) if isinstance(value, Record) else None
    return value


def part_differences(model: Model, parts: Parts) -> Iterator[str]:
    for name, expected in parts.items():
        if (value := part(model, name)) != expected:
            yield f"{name} is {value}, not {expected}"


DATA = Path(__file__).with_name("formats.yaml")
IN_EVERY_FORM = ("tied_embeddings", "rope_scaling")
SETTINGS = Path(__file__).with_name("settings.yaml")


class WeightsFormat(Record):
    """One entry of ``formats.yaml``, which documents fields without a docstring here."""

    model_type: str
    model_class: str
    weights: bool = True
    also: tuple[str, ...] = ()
    multimodal_type: str | None = None
    """The type in ``config.json`` of a multimodal model with this text model."""
    parts: dict[str, Any]
    equal: dict[str, str] = Field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Parts that a model must have, whatever their values."""
    settings: dict[str, str]
    constants: dict[str, Any] = Field(default_factory=dict)
    silent: dict[str, Any]
    renamed: dict[str, str] = Field(default_factory=dict)
    compared: tuple[str, ...]
    unused: tuple[str, ...] = ()
    multimodal_keys: tuple[str, ...] = ()
    sums: dict[str, tuple[str, str]] = Field(default_factory=dict)
    products: dict[str, tuple[str, str]] = Field(default_factory=dict)
    every_window: int | None = None
    programs: str | None = None
    lists_layers: bool = False
    """True if the configuration lists the layers that have experts, and the layers with rotary positions."""
    names: dict[str, str] = Field(default_factory=dict)
    expert_matrices: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class IgnoredSettings(Record):
    """Keys of ``config.json`` that do not affect training, all for the same reason."""

    why: str
    keys: tuple[str, ...]


class CommonSettings(Record):
    """The content of ``settings.yaml``, which documents the fields."""

    ignored: tuple[IgnoredSettings, ...]
    fixed: dict[str, Any]


class FormatsFile(Record):
    """The content of ``formats.yaml``."""

    formats: tuple[WeightsFormat, ...]


@cache
def weights_formats() -> tuple[WeightsFormat, ...]:
    return read_file(DATA, FormatsFile, wrap="formats").formats


@cache
def common_settings() -> CommonSettings:
    return read_file(SETTINGS, CommonSettings)


def format_of(model: Model) -> WeightsFormat:
    """Return a model's format. Raise UsageError if none fits, with the model's differences from the nearest."""
    forms = [form for form in weights_formats() if form.weights]
    problems = {form.model_class: list(obstacles(model, form)) for form in forms}
    fitting = next((form for form in forms if not problems[form.model_class]), None)
    if fitting is None:
        nearest = min(problems, key=lambda name: len(problems[name]))
        what = f"{model.model} {model.size} fits no Hugging Face format; the nearest is {nearest}, but:"
        raise UsageError(what + itemized(problems[nearest]))
    return fitting


def obstacles(model: Model, form: WeightsFormat) -> Iterator[str]:
    """Yield why ``form`` cannot express ``model``: different or missing parts, and other non-default fields."""
    yield from part_differences(model, form.parts)
    named = (*form.parts, *form.equal, *form.settings.values())
    names = {*IN_EVERY_FORM, *(name.partition(".")[0] for name in named)} - {"other_parts"}
    for name, field in Model.model_fields.items():
        if name not in names and not field.is_required() and (value := getattr(model, name)) != field.default:
            yield f"{name} is {value}, not {field.default}"
    for name, other in form.equal.items():
        if part(model, name) != part(model, other):
            yield f"{name} is {part(model, name)}, not {part(model, other)} as {other}"
    for name in form.needed:
        if part(model, name) is None:
            yield f"the model has no {name}"


Shape = tuple[int, ...]
Tensor = TypeVar("Tensor")
"""Identifies a tensor, or a part of a tensor."""

READABLE = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of safetensors that convert to fp32 without loss, with their bytes per element."""

HEAD = "lm_head."
HEAD_WEIGHT = "lm_head.weight"
DECODER = "model."
LANGUAGE_MODEL = "language_model."
"""Prefix of every name of the text model if a Llama 4 model includes vision."""
VISION = ("vision_model.", "multi_modal_projector.")
ROTARY_TABLE = ".rotary_emb.inv_freq"
"""Suffix of a tensor that is computed from the configuration; old versions of transformers saved it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Match:
    """The stored tensors of each parameter, the tensors to ignore, and all problems that prevent the import."""

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
    """Return ``shape``, but gate and up of stacked experts as one dimension, gate first: [experts, hidden, 2 x ffn]."""
    if name.endswith(".experts.gate_up_proj"):
        return (*shape[:-2], shape[-2] * shape[-1])
    return shape


def matrices_of_expert(name: str, form: WeightsFormat) -> tuple[str, ...]:
    """Return the names of the tensors that each expert has in the format instead of one stacked parameter, if any."""
    return form.expert_matrices.get(name.rpartition(".")[2], ())


def stored_tensors(name: str, shape: Shape, form: WeightsFormat) -> dict[str, Shape]:
    """Return a parameter's tensors with shapes; tensors of single experts are in order, each [outputs, inputs]."""
    stored, matrices = hugging_face_name(name, form), matrices_of_expert(name, form)
    if not matrices:
        return {stored: hugging_face_shape(name, shape)}
    experts, inputs, outputs = shape[0], shape[1], shape[-1]
    above = stored.rpartition(".")[0]
    return {f"{above}.{e}.{matrix}.weight": (outputs, inputs) for e in range(experts) for matrix in matrices}


def match_tensors(
    parameters: Mapping[str, Shape], available: Mapping[str, StoredTensor], form: WeightsFormat, *, tied: bool = False
) -> Match:
    """Match every parameter to stored tensors by name; missing and unknown tensors, wrong shapes and dtypes are
    problems.
    """
    multimodal = any(name.startswith(LANGUAGE_MODEL) for name in available)
    prefix = LANGUAGE_MODEL if multimodal else ""
    expected = {
        name: {prefix + stored: needed for stored, needed in stored_tensors(name, shape, form).items()}
        for name, shape in parameters.items()
    }
    names = {stored for tensors in expected.values() for stored in tensors}
    left_out = tuple(name for name in available if _can_be_left_out(name, multimodal=multimodal, tied=tied))
    unknown = available.keys() - names - set(left_out)
    problems = [
        problem
        for tensors in expected.values()
        for stored, needed in tensors.items()
        for problem in _problems(stored, needed, available)
    ]
    problems += [f"{name} is not a tensor of this model" for name in sorted(unknown)]
    return Match({name: tuple(tensors) for name, tensors in expected.items()}, left_out, tuple(problems))


def _can_be_left_out(name: str, *, multimodal: bool, tied: bool) -> bool:
    if tied and name == HEAD_WEIGHT:
        return True
    return name.endswith(ROTARY_TABLE) or (multimodal and name.startswith(VISION))


def _problems(name: str, shape: Shape, available: Mapping[str, StoredTensor]) -> Iterator[str]:
    stored = available.get(name)
    if stored is None:
        yield f"{name} is missing"
        return
    if stored.shape != shape:
        yield f"{name} has the shape {list(stored.shape)}; the model has {list(shape)}"
    if stored.dtype not in READABLE:
        yield f"{name} has the dtype {stored.dtype}; supported: {', '.join(READABLE)}"


SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, in decimal units. Raise UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", text.strip(), re.IGNORECASE)
    size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"'{text}' is not a size", do="pass a size above 0 in B, KB, MB, GB or TB, such as 5GB")
    return size


def plan_shards(sizes: Mapping[Tensor, int], largest: int) -> list[list[Tensor]]:
    """Return the tensors of each file, in order. A file has at most ``largest`` bytes, or a single tensor."""
    shards: list[list[Tensor]] = []
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
    """Return the content of ``model.safetensors.index.json``."""
    files = shard_files(len(shards))
    weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MATRICES = {"A": "a", "B": "b"}
"""Our names of the matrices of an adapter, by peft's names."""
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
}
"""The only values of these settings that the engine's adapters can express."""


def adapter_config(lora: Lora, model: Model, base: str | None) -> dict[str, Any]:
    """Return the configuration that peft reads, with Q, K and V as separate targets even if they share A."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [name for name in ADAPTED[lora.targets] if name != "gate_proj" or model.mlp == "swiglu"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def adapter_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield unsupported settings of ``adapter_config.json``, and a rank or alpha that is not a number."""
    for name, supported in UNSUPPORTED.items():
        if name in config and config[name] not in supported:
            yield f"{name} is {config[name]}, which is unsupported"
    for name, kind in {"r": int, "lora_alpha": int | float}.items():
        if not isinstance(config.get(name), kind):
            yield f"{name} is {config.get(name)}, not a number"


def peft_layers(layers: Iterable[str], form: WeightsFormat) -> dict[str, str]:
    """Return peft's name of each layer in ``layers``, which are names such as ``layers.0.self_attn.q_proj``."""
    return {layer: PEFT_PREFIX + hugging_face_name(f"{layer}.weight", form).removesuffix(".weight") for layer in layers}


def peft_tensor(layer: str, matrix: str) -> str:
    return f"{layer}.lora_{matrix}.weight"


def matrix_names(layer: str, lora: Lora) -> dict[str, str]:
    """Return the names of the parameters that hold a layer's A and B, by peft's names of the matrices."""
    if not lora.fused:
        return {matrix: f"{layer}.adapter.{ours}.weight" for matrix, ours in MATRICES.items()}
    owner, _, name = layer.rpartition(".")
    return {"A": f"{owner}.qkv_adapter.a.weight", "B": f"{owner}.qkv_adapter.b.{name}.weight"}


def adapted_layers(names: Iterable[str], targets: LoraTargets) -> list[str]:
    """Return the names of the layers, among the parameters ``names``, that have adapters with these targets."""
    layers = (name.removesuffix(".weight") for name in names)
    return [layer for layer in layers if layer.rpartition(".")[2] in ADAPTED[targets]]


def targets_of(layers: Iterable[str], *, shared: bool) -> LoraTargets | None:
    """Return the targets of ``layers``, perhaps without ``gate_proj``; None if none fit. If ``shared``, QKV share A."""
    names = set(layers)
    fitting: tuple[LoraTargets, ...] = ("qkv", "qkv-split", "qv", "attention", "all-linear")
    for targets in fitting if shared else fitting[1:]:
        if names in (set(ADAPTED[targets]), set(ADAPTED[targets]) - {"gate_proj"}):
            return targets
    return None


def adapter_shapes(layer: Shape, rank: int) -> dict[str, Shape]:
    """Return the shapes of A and B for a weight with the shape ``layer``, [outputs, inputs]."""
    return {"A": (rank, layer[1]), "B": (layer[0], rank)}

# SPDX-License-Identifier: Apache-2.0
"""Adapters in peft's format: ``adapter_config.json``, and the names of the tensors in its safetensors file. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmb.catalogue.records import ADAPTED, Lora, LoraTargets, Model
from llmb.huggingface.formats import WeightsFormat
from llmb.huggingface.tensors import Shape, hugging_face_name

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
MATRICES = {"A": "a", "B": "b"}
"""peft's name of a matrix, and ours."""
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
    """What peft reads; a shared A is written once for each projection."""
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
    """Settings of ``adapter_config.json`` that are unsupported."""
    for name, supported in UNSUPPORTED.items():
        if name in config and config[name] not in supported:
            yield f"{name} is {config[name]}, which is unsupported"
    for name, kind in {"r": int, "lora_alpha": int | float}.items():
        if not isinstance(config.get(name), kind):
            yield f"{name} is {config.get(name)}, not a number"


def peft_layers(layers: Iterable[str], form: WeightsFormat) -> dict[str, str]:
    """peft's name of each adapted layer, such as ``layers.0.self_attn.q_proj``."""
    return {layer: PEFT_PREFIX + hugging_face_name(f"{layer}.weight", form).removesuffix(".weight") for layer in layers}


def peft_tensor(layer: str, matrix: str) -> str:
    return f"{layer}.lora_{matrix}.weight"


def own_names(layer: str, lora: Lora) -> dict[str, str]:
    """The parameters that hold A and B of a layer, by peft's names of the matrices."""
    if not lora.fused:
        return {matrix: f"{layer}.adapter.{ours}.weight" for matrix, ours in MATRICES.items()}
    owner, _, name = layer.rpartition(".")
    return {"A": f"{owner}.qkv_adapter.a.weight", "B": f"{owner}.qkv_adapter.b.{name}.weight"}


def adapted_layers(names: Iterable[str], targets: LoraTargets) -> list[str]:
    """The layers with adapters among a model's parameters, given by name."""
    layers = (name.removesuffix(".weight") for name in names)
    return [layer for layer in layers if layer.rpartition(".")[2] in ADAPTED[targets]]


def targets_of(layers: Iterable[str], *, shared: bool) -> LoraTargets | None:
    """The targets of exactly the layers of these names (``q_proj``); ``shared``: query, key and value have one A."""
    found = set(layers)
    fitting: tuple[LoraTargets, ...] = ("qkv", "qkv-split", "qv", "attention", "all-linear")
    for targets in fitting if shared else fitting[1:]:
        if found in (set(ADAPTED[targets]), set(ADAPTED[targets]) - {"gate_proj"}):
            return targets
    return None


def adapter_shapes(layer: Shape, rank: int) -> dict[str, Shape]:
    """Shapes of A and B of a layer with the weight ``layer``, [outputs, inputs]."""
    return {"A": (rank, layer[1]), "B": (layer[0], rank)}

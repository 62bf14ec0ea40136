# SPDX-License-Identifier: Apache-2.0
"""Builds the content of a model's ``config.json``, and finds how another ``config.json`` differs."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal

from llmb.catalogue.records import Mlp, Model
from llmb.runs.huggingface.tensors import WeightsFormat, common_settings, format_of, part

Config = Mapping[str, Any]
ExportDtype = Literal["fp32", "bf16"]

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
ACTIVATIONS: dict[Mlp, str] = {"swiglu": "silu", "squared-relu": "relu2"}
TIED = "tie_word_embeddings"
SILENT_EVERYWHERE = {"attention_bias": False, "mlp_bias": False, TIED: False}
NULL_MEANS_NONE = ("attention_chunk_size",)
"""Settings for which null is a value; for all others null means not specified."""
OBJECTS = ("rope_scaling", "rope_parameters", "text_config")
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
HEADS = ("num_key_value_heads", "head_dim")
LAYER_LISTS = ("moe_layers", "no_rope_layers", "layer_types", "attn_temperature_tuning")
LONGEST_SHOWN = 200
MOST_LAYERS = 1000
"""Maximum number of layers whose settings are listed one by one."""
COMPARED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
"""Settings of every format that act on weights."""


def config_of(model: Model, dtype: ExportDtype, form: WeightsFormat | None = None) -> dict[str, Any]:
    """Return the ``config.json`` of a model with weights in ``dtype``. Raise UsageError if no format can express it."""
    form = form or format_of(model)
    return {
        "architectures": [form.model_class],
        "model_type": form.model_type,
        "dtype": TORCH_NAMES[dtype],
        "torch_dtype": TORCH_NAMES[dtype],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": ACTIVATIONS[model.mlp],
        "max_position_embeddings": model.max_seq_len,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{name: _setting(part(model, field)) for name, field in form.settings.items()},
        **form.constants,
        **(_layer_lists(model) if form.lists_layers else {}),
    }


def config_differences(model: Model, config: Config) -> Iterator[str]:
    """Yield how ``config`` describes another model, or unusable weights; settings that act on no weight are not
    compared.
    """
    form = format_of(model)
    if config.get("model_type") not in _types(form):
        yield f"model_type is {config.get('model_type')}; {model.model} {model.size} is {form.model_type}"
        return
    if malformed := [name for name in OBJECTS if not isinstance(config.get(name) or {}, Mapping)]:
        yield f"{malformed[0]} is {shown_value(config[malformed[0]])}, which is not a JSON object"
        return
    text = text_config(config, form)
    if config.get("quantization_config") or text.get("quantization_config"):
        yield "quantization_config is set: quantized weights are unsupported"
    for name, shown, value in setting_differences(model, text, form):
        yield f"{name} is {shown}; in {model.model} {model.size} it is {value}"


def setting_differences(model: Model, text: Config, form: WeightsFormat) -> Iterator[tuple[str, str, object]]:
    """Yield the name, the value as text, and the model's value of each setting that acts on weights and differs."""
    (expected,) = _readings(config_of(model, "fp32", form), form)
    readings = _readings(text, form)
    for name, value in expected.items():
        for shown in dict.fromkeys(shown_value(reading[name]) for reading in readings if reading[name] != value):
            yield name, shown, value


def unknown_keys(model: Model, config: Config) -> Iterator[str]:
    """Yield keys with values whose effect on the model is unknown. ``config`` must not differ from the model."""
    yield from unknown_to(format_of(model), config)


def unknown_to(form: WeightsFormat, config: Config) -> Iterator[str]:
    """Describe keys that a format does not have, and settings with a value other than the only valid one."""
    common = {key for ignored in common_settings().ignored for key in ignored.keys}
    keys = {*COMPARED, *SILENT_EVERYWHERE, *ROTARY, *HEADS, *form.settings, *form.renamed, *form.compared, *form.unused}
    keys |= set(LAYER_LISTS) if form.lists_layers else {"sliding_window"} if form.every_window else set()
    keys |= set(chain(*form.sums.values(), *form.products.values()))
    if config.get("model_type") == form.multimodal_type:
        levels = [(config, {TIED, *form.multimodal_keys}), (config.get("text_config") or {}, keys)]
    else:
        levels = [(config, keys)]
    for settings, keys in levels:
        for name, value in settings.items():
            if value is not None and name not in keys | common and name != "quantization_config":
                if name not in common_settings().fixed:
                    yield f"{name} is {shown_value(value)}"
                elif value != common_settings().fixed[name]:
                    yield f"{name} is {shown_value(value)}, not {common_settings().fixed[name]}"


def _types(form: WeightsFormat) -> tuple[str | None, ...]:
    return (form.model_type, form.multimodal_type) if form.multimodal_type else (form.model_type,)


def text_config(config: Config, form: WeightsFormat) -> Config:
    """Return the settings of the text model, including whether the multimodal model ties its embedding."""
    if config.get("model_type") != form.multimodal_type:
        return config
    text = config.get("text_config") or {}
    return {**text, TIED: config.get(TIED) or text.get(TIED)}


def shown_value(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _setting(value: object) -> object:
    if value == "rmsnorm":
        return True
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _layer_lists(model: Model) -> dict[str, Any]:
    layers = range(model.layers)
    return {
        "moe_layers": [layer for layer in layers if model.is_moe_layer(layer)],
        "no_rope_layers": [int(not model.is_global_layer(layer)) for layer in layers],
    }


def _readings(config: Config, form: WeightsFormat) -> list[dict[str, Any]]:
    """Rotary settings in two places give two readings: the version of transformers decides which counts."""
    set_values = {name: value for name, value in config.items() if value is not None or name in NULL_MEANS_NONE}
    renamed = {usual: set_values[name] for name, usual in form.renamed.items() if name in set_values}
    values = {**SILENT_EVERYWHERE, **form.silent, **renamed, **set_values}
    heads = _count(values, "num_attention_heads")
    if not form.lists_layers and _has_full_attention(values):
        del values["layer_types"]  # as if not specified
    settings = {
        **{name: values.get(name) for name in (*COMPARED, *form.compared, *SILENT_EVERYWHERE)},
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "head_dim": values.get("head_dim", heads and _count(values, "hidden_size") // heads),
        **(_layer_settings(values) if form.lists_layers else {}),
    }
    rotary = [values[name] for name in ("rope_scaling", "rope_parameters") if values.get(name)]
    return [{**settings, **_rotary_settings(values, rope)} for rope in rotary or [{}]]


def _has_full_attention(values: Config) -> bool:
    kinds = values.get("layer_types")
    is_complete = isinstance(kinds, list) and len(kinds) == _count(values, "num_hidden_layers")
    return is_complete and all(kind == "full_attention" for kind in kinds or ())


def _rotary_settings(values: Config, rotary: Config) -> dict[str, Any]:
    """Return the rotary settings; as in transformers 5, ``rotary`` overrides other settings."""
    rope = dict(rotary)
    theta = rope.pop("rope_theta", values["rope_theta"])
    fraction = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    scaling = {"rope_type": kind, **rope} if rope or kind != "default" else None
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": fraction}


def _layer_settings(values: Config) -> dict[str, Any]:
    layers = range(min(_count(values, "num_hidden_layers"), MOST_LAYERS))
    step, interval = (_count(values, name) or 1 for name in ("interleave_moe_layer_step", "no_rope_layer_interval"))
    rotary = values.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in layers]
    rotary = rotary if isinstance(rotary, list) else [rotary]
    kinds = ["chunked_attention" if turned else "full_attention" for turned in rotary]
    return {
        "moe_layers": values.get("moe_layers", list(layers[step - 1 :: step])),
        "no_rope_layers": rotary,
        "layer_types": values.get("layer_types", kinds),
        "attn_temperature_tuning": bool(values["attn_temperature_tuning"]),  # Maverick's own file says 4, not true
    }


def _count(values: Config, name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0

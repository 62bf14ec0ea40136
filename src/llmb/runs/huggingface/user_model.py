# SPDX-License-Identifier: Apache-2.0
"""A model described by a Hugging Face ``config.json``: every key is used, changes nothing, or is rejected by name."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmb.base.errors import UsageError, closest, itemized
from llmb.base.input_files import check_values, read_text_file
from llmb.catalogue.custom import UserModel, size_of_file
from llmb.catalogue.records import ConfigFile, Model, RopeScaling, SlidingWindow, Yarn
from llmb.runs.huggingface.model_config import (
    MOST_LAYERS,
    ROTARY,
    TIED,
    Config,
    setting_differences,
    shown_value,
    text_config,
    unknown_to,
)
from llmb.runs.huggingface.tensors import WeightsFormat, weights_formats

FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "max_seq_len",
    "initializer_range": "init_std",
    TIED: "tied_embeddings",
}
"""Settings of every format, with the model's fields that they set."""
USUAL = {"initializer_range": 0.02, TIED: False}
SCALINGS = {
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set[str]()),
    "yarn": (
        {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
        {"mscale", "mscale_all_dim", "attention_factor", "truncate"},
    ),
}
"""Settings by type of rotary scaling: settings that set fields, and ignored settings."""
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def read_user_model(path: Path) -> UserModel:
    """Return the model, and its file's path and digest. Raise UsageError if a key or the file is unusable."""
    size = size_of_file(path)
    text = read_text_file(path)
    try:
        check_values(text)
        config = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the file is not valid JSON: {error}", where=str(path), do="correct it") from error
    if not isinstance(config, dict):
        raise UsageError("the file is not a JSON object", where=str(path), do="pass a config.json of Hugging Face")
    form = _format(config, path)
    model, problems = _model(config, form, size)
    if problems or model is None:
        do = "add, change or remove these settings, or describe the model by its parts: see 'llmb docs add-a-model'"
        raise UsageError(f"this model is not supported:{itemized(problems)}", where=str(path), do=do)
    digest = hashlib.sha256(text).hexdigest()
    return UserModel(
        model, ConfigFile(path=str(path), sha256=digest, model_type=config["model_type"], programs=form.programs)
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise ValueError if a JSON object has a key twice, as one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ValueError(f"'{name}' occurs twice")
    return found


def _format(config: Config, path: Path) -> WeightsFormat:
    kind = config.get("model_type")
    types = {name: form for form in weights_formats() for name in (form.model_type, *form.also, form.multimodal_type)}
    if not isinstance(kind, str) or kind not in types:
        near = closest(kind, [name for name in types if name], cutoff=0.65) if isinstance(kind, str) else []
        what = f"model_type is {'missing' if kind is None else f'{shown_value(kind)}, which is not supported'}"
        choices = near or [name for name in types if name]
        raise UsageError(what, where=str(path), choices=choices, do="see 'llmb docs add-a-model' for other models")
    return types[kind]


def _model(config: Config, form: WeightsFormat, size: str) -> tuple[Model | None, list[str]]:
    text = text_config(config, form)
    set_values = {name: value for name, value in text.items() if value is not None or name == "sliding_window"}
    renamed = {usual: set_values[name] for name, usual in form.renamed.items() if name in set_values}
    values = {**USUAL, **form.silent, **renamed, **set_values}
    fields: dict[str, Any] = {"model": config["model_type"], "size": size, "source": "a config.json of one's own"}
    keys: dict[str, str] = {}
    twice = [name for name, usual in form.renamed.items() if name in set_values and values[usual] != set_values[name]]
    problems = [f"{name} and {form.renamed[name]}, two names of one setting, have different values" for name in twice]
    problems += [*_rotary(values, fields), *_windows(values, form, fields)]
    _set_all(fields, form.parts)
    for key, field in (*FIELDS.items(), *form.settings.items()):
        if key in values:
            value = values[key]
            _set(fields, field, "rmsnorm" if field == "qk_norm" and value is True else value or None)
            keys[field] = key
    fields.setdefault("kv_heads", fields.get("attention_heads"))
    problems += _heads_and_products(values, form, fields)
    _set_all(fields, {field: fields.get(other) for field, other in form.equal.items() if "." not in field})
    if "moe" in fields and form.equal.get("moe.shared_ffn_hidden_size"):
        _set(fields, "moe.shared_ffn_hidden_size", fields["moe"].get("ffn_hidden_size"))
    try:
        model = Model.model_validate(fields)
    except ValidationError as error:
        return None, [*problems, *_invalid(error, keys, values, form)]
    if model.layers > MOST_LAYERS:
        return None, [*problems, f"num_hidden_layers is {model.layers}; at most {MOST_LAYERS} are supported"]
    if model.attention_heads % model.kv_heads:
        problems.append(f"num_key_value_heads is {model.kv_heads}, which does not divide {model.attention_heads} heads")
    problems += _differences(model, values, form)
    return model, [*dict.fromkeys(problems + list(unknown_to(form, config)))]


def _set_all(fields: dict[str, Any], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        _set(fields, name, value)


def _set(fields: dict[str, Any], name: str, value: object) -> None:
    *above, last = name.split(".")
    if value is None:
        return
    for each in above:
        fields = fields.setdefault(each, {})
    fields[last] = value


def _heads_and_products(values: Config, form: WeightsFormat, fields: dict[str, Any]) -> Iterator[str]:
    whole = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    for group, combine in ((form.sums, int.__add__), (form.products, int.__mul__)):
        for field, (first, second) in group.items():
            if missing := [key for key in (first, second) if key not in whole]:
                yield f"{missing[0]} is {shown_value(values.get(missing[0]))}; it must be a whole number"
            else:
                _set(fields, field, combine(whole[first], whole[second]) or None)
    if "head_dim" in form.sums:
        return
    if "head_dim" in values:
        fields["head_dim"] = values["head_dim"]
    elif whole.get("num_attention_heads", 0) > 0 and "hidden_size" in whole:
        fields["head_dim"] = whole["hidden_size"] // whole["num_attention_heads"]


def _rotary(values: dict[str, Any], fields: dict[str, Any]) -> Iterator[str]:
    """Set the fields of rotary embeddings, and yield unsupported settings."""
    places = {name: values[name] for name in ("rope_scaling", "rope_parameters") if values.get(name)}
    if len(places) == 2 and _described(places["rope_scaling"]) != _described(places["rope_parameters"]):
        yield "rope_scaling and rope_parameters differ: which of them counts depends on the version of transformers"
    name, rope = next(reversed(places.items()), ("rope_scaling", {}))
    if not isinstance(rope, dict):
        yield f"{name} is {shown_value(rope)}, which is not a JSON object"
        return
    rope = dict(rope)
    fields["rope_theta"] = rope.pop("rope_theta", values.get("rope_theta"))
    fields["rotary_fraction"] = rope.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in SCALINGS:
        if kind != "default":
            yield f"{name} has the type {shown_value(kind)}; supported: default, {', '.join(SCALINGS)}"
        yield from (f"{name}.{key} is set, but the type is default" for key in rope if kind == "default")
        return
    own, unused = SCALINGS[kind]
    yield from (f"{name}.{key} is {shown_value(rope[key])}, an unknown setting" for key in rope.keys() - own - unused)
    usual = {"original_max_position_embeddings": values.get("max_position_embeddings"), **YARN}
    found = {key: rope.get(key, usual.get(key) if kind == "yarn" else None) for key in own}
    found["original_max_position"] = found.pop("original_max_position_embeddings")
    try:
        if kind == "yarn":
            _set(fields, "other_parts.yarn", Yarn.model_validate(found))
        else:
            fields["rope_scaling"] = RopeScaling.model_validate(found)
    except ValidationError as error:
        yield from (f"{name}.{item['loc'][0]}: {item['msg']}" for item in error.errors())


def _described(rope: object) -> object:
    return {key: value for key, value in rope.items() if key != "type"} if isinstance(rope, dict) else rope


def _windows(values: dict[str, Any], form: WeightsFormat, fields: dict[str, Any]) -> Iterator[str]:
    if form.every_window is None:
        return
    tokens, kinds = values.pop("sliding_window", None), values.pop("layer_types", None)
    if tokens is None or (isinstance(kinds, list) and set(map(str, kinds)) == {"full_attention"}):
        return
    every = form.every_window
    if kinds is not None:
        layers = range(len(kinds)) if isinstance(kinds, list) else ()
        pattern = ["full_attention" if layer % every else "sliding_attention" for layer in layers]
        if not pattern or kinds != pattern or len(kinds) != values.get("num_hidden_layers"):
            only = f"only windows in the first of every {every} layers are supported"
            yield f"layer_types is {shown_value(kinds)}; {only}"
    try:
        _set(fields, "other_parts.sliding_window", SlidingWindow.model_validate({"tokens": tokens, "every": every}))
    except ValidationError:
        yield f"sliding_window is {shown_value(tokens)}; it must be a whole number, or null"


def _invalid(error: ValidationError, keys: Mapping[str, str], values: Config, form: WeightsFormat) -> Iterator[str]:
    every = {field: key for key, field in (*FIELDS.items(), *form.settings.items())} | dict(keys)
    for item in error.errors():
        field = ".".join(map(str, item["loc"]))
        key = every.get(field, field)
        missing = item["type"] == "missing" or values.get(key) is None
        yield f"{key} is missing" if missing else f"{key} is {shown_value(values[key])}: {item['msg']}"


def _differences(model: Model, values: Config, form: WeightsFormat) -> Iterator[str]:
    """Yield settings that differ from those that llmb would write for the model."""
    read = {*ROTARY, *form.sums, "layer_types" if form.every_window else ""}
    for name, shown, expected in setting_differences(model, values, form):
        if name not in read and shown != "None":
            yield f"{name} is {shown}; only {expected} is supported"

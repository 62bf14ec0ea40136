# SPDX-License-Identifier: Apache-2.0
"""Reads a NeMo 2 checkpoint of Llama 3 or 3.1 without unpickling, and checks that it can be imported."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmb.base.errors import UsageError, itemized
from llmb.base.input_files import MOST_TEXT_BYTES, check_values, read_regular
from llmb.catalogue.data_files import LOADER, check_yaml
from llmb.catalogue.records import Model
from llmb.runs.checkpoints.checkpoint import WEIGHTS
from llmb.runs.huggingface.model_folder import WeightsFolder
from llmb.runs.huggingface.tensors import format_of

SIGNS = (f"{WEIGHTS}/metadata.json", f"{WEIGHTS}/common.pt", "context/model.yaml", "context/io.json")
MODEL_FILE = "context/model.yaml"
BACKEND_FILE = f"{WEIGHTS}/metadata.json"
METADATA_FILE = f"{WEIGHTS}/.metadata"
DOCUMENTS = (MODEL_FILE, BACKEND_FILE, METADATA_FILE)
BACKEND = "torch_dist"
SUPPORTED = "llama"
TOKENIZERS = ("context/nemo_tokenizer", "context")
"""Folders where NeMo keeps the tokenizer of a Hugging Face model."""
CONVERT = (
    "convert it with NeMo: llm.export_ckpt(path=CHECKPOINT, target='hf', output_path=FOLDER), and pass that folder"
)
SAME: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "layernorm_zero_centered_gamma": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "seq_len_interpolation_factor": None,
    "qk_layernorm": False,
    "num_moe_experts": None,
    "multi_latent_attention": False,
}
"""Settings with the same value in all supported models. NeMo versions that lack a setting behave as with this value."""


def is_nemo_folder(path: Path) -> bool:
    return any((path / sign).is_file() for sign in SIGNS)


def read_nemo_folder(path: Path) -> WeightsFolder:
    """Read the folder of a NeMo 2 checkpoint; raise UsageError if it is unreadable or its format unsupported."""
    for name in DOCUMENTS:
        if not (path / name).is_file():
            what = f"this is a NeMo 2 checkpoint without '{name}', which describes how to read it"
            raise UsageError(what, where=str(path), do=CONVERT)
    backend = _parsed(path / BACKEND_FILE).get("sharded_backend")
    if backend != BACKEND:
        what = f"this NeMo 2 checkpoint was saved by '{backend}'; only '{BACKEND}' is supported"
        raise UsageError(what, where=str(path), do=CONVERT)
    config = _parsed(path / MODEL_FILE).get("config")
    if not isinstance(config, dict):
        raise UsageError("the file has no model settings under 'config'", where=str(path / MODEL_FILE), do=CONVERT)
    files = sorted(str(file.relative_to(path)) for file in (path / WEIGHTS).glob("*.distcp"))
    whole = path.absolute()
    contexts = (whole / name for name in TOKENIZERS)
    context = next((each for each in contexts if (each / "tokenizer.json").is_file()), whole / TOKENIZERS[-1])
    return WeightsFolder("nemo", whole, config, tuple(files), DOCUMENTS, context)


def check_nemo_config(folder: WeightsFolder, model: Model) -> None:
    """Raise UsageError if the checkpoint is not of ``model``, or if such models cannot be imported from NeMo."""
    name, where = f"{model.model} {model.size}", str(folder.path / MODEL_FILE)
    if format_of(model).model_type != SUPPORTED or model.tied_embeddings:
        what = f"NeMo 2 checkpoints are supported for Llama 3 and 3.1 only, not for {name}"
        raise UsageError(what, where=str(folder.path), do=CONVERT)
    if differences := list(nemo_differences(folder.config, model)):
        do = "pass the checkpoint's workload and size with -w and -s; see 'llmb list'"
        raise UsageError(f"the checkpoint's model is not {name}:{itemized(differences)}", where=where, do=do)


def nemo_differences(config: Mapping[str, Any], model: Model) -> Iterator[str]:
    """Yield settings that differ from ``model``, including settings that affect no weight's shape."""
    expected = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.attention_heads,
        "num_query_groups": model.kv_heads,
        "rotary_base": model.rope_theta,
        "layernorm_epsilon": model.norm_eps,
        "share_embeddings_and_output_weights": model.tied_embeddings,
    }
    for name, value in expected.items():
        if config.get(name) != value:
            yield f"{name} is {config.get(name)}, not {value}"
    for name, value in SAME.items():
        if config.get(name, value) != value:
            yield f"{name} is {config[name]}, not {value}"
    if (channels := config.get("kv_channels")) not in (None, model.head_dim):
        yield f"kv_channels is {channels}, not {model.head_dim}"
    activation = config.get("activation_func")
    if not str(activation.get("_target_") if isinstance(activation, dict) else activation).endswith("silu"):
        yield f"activation_func is {activation}, not silu"
    yield from _scaling_differences(config, model)


def _scaling_differences(config: Mapping[str, Any], model: Model) -> Iterator[str]:
    scaling = model.rope_scaling
    expected = {
        "scale_factor": scaling and scaling.factor,
        "low_freq_factor": scaling and scaling.low_freq_factor,
        "high_freq_factor": scaling and scaling.high_freq_factor,
        "old_context_len": scaling and scaling.original_max_position,
    }
    for name, value in expected.items():
        if config.get(name) != value:
            yield f"{name} is {config.get(name)}, not {value}"


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = read_regular(path, MOST_TEXT_BYTES)
        is_json = path.suffix == ".json"
        (check_values if is_json else check_yaml)(text)
        content = json.loads(text) if is_json else yaml.load(text, Loader=LOADER)  # noqa: S506 (a safe loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"the file cannot be read: {error}", where=str(path), do=CONVERT) from error
    if not isinstance(content, dict):
        raise UsageError("the file contains no settings", where=str(path), do=CONVERT)
    return content

# SPDX-License-Identifier: Apache-2.0
"""Models as transformers publishes them, with random weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration, set_seed

from llmb.catalogue.records import Model
from llmb.runs.huggingface.model_config import config_of
from llmb.runs.huggingface.tensors import format_of


def write_published(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Makes and saves a model in several files, that of Llama 4 with a vision part; the text model, in fp32."""
    set_seed(11)
    config = AutoConfig.for_model(**config_of(model, "fp32"))
    if format_of(model).multimodal_type is None:
        whole = text = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        whole = _with_vision(config)
        text = whole.language_model
        text.config._attn_implementation = "eager"
    _convert(whole, dtype)
    whole.save_pretrained(folder, max_shard_size="1MB")
    _convert(whole, torch.float32)
    return text


def _convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: a rotary table in bf16 is another model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _with_vision(config: AutoConfig) -> Llama4ForConditionalGeneration:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    ends = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 28}
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=config.to_dict(), vision_config=small | ends))
    for layer in whole.language_model.model.layers:
        if hasattr(layer.feed_forward, "experts"):
            layer.feed_forward.experts.gate_up_proj.data.normal_(std=0.05)
    return whole

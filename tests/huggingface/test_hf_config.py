# SPDX-License-Identifier: Apache-2.0
"""config.json: what transformers makes of ours, and what we make of theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Llama4TextConfig, LlamaConfig, MixtralConfig, NemotronConfig, Qwen3Config

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Model
from llmb.errors import UsageError
from llmb.huggingface.config import config_differences, config_of

MODELS = Catalogue().models
CLASSES = {
    "llama3.1": LlamaConfig,
    "llama3": LlamaConfig,
    "nemotron4": NemotronConfig,
    "llama4-maverick": Llama4TextConfig,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
}
LLAMA_8B = MODELS["llama3.1", "8b"]
MAVERICK = MODELS["llama4-maverick", "400b"]
NEMOTRON = MODELS["nemotron4", "340b"]


def loaded(model: Model, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config_of(model, "bf16")))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_transformers_reads_every_model_and_what_it_writes_is_the_same_model(
    key: tuple[str, str], tmp_path: Path
) -> None:
    model = MODELS[key]
    config = loaded(model, tmp_path)
    assert type(config) is CLASSES[model.model]
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    assert list(config_differences(model, written)) == []


def test_values_arrive_where_transformers_looks_for_them(tmp_path: Path) -> None:
    llama = loaded(LLAMA_8B, tmp_path)
    assert llama.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000,
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    assert (llama.head_dim, llama.rms_norm_eps, llama.max_position_embeddings) == (128, 1e-5, 131072)
    assert str(llama.dtype).endswith("bfloat16")
    assert llama.tie_word_embeddings is False
    assert llama.eos_token_id is None
    nemotron = loaded(NEMOTRON, tmp_path)
    assert nemotron.rope_parameters["partial_rotary_factor"] == 0.5
    assert (nemotron.head_dim, nemotron.hidden_act, nemotron.norm_eps) == (192, "relu2", 1e-5)
    maverick = loaded(MAVERICK, tmp_path)
    assert maverick.moe_layers == list(range(1, 48, 2))
    assert maverick.layer_types[:4] == ["chunked_attention"] * 3 + ["full_attention"]
    assert (maverick.intermediate_size, maverick.intermediate_size_mlp) == (8192, 16384)
    assert (maverick.attention_chunk_size, maverick.floor_scale, maverick.attn_scale) == (8192, 8192, 0.1)
    assert maverick.use_qk_norm is False
    qwen, tied = (loaded(MODELS["qwen3", size], tmp_path) for size in ("8b", "0.6b"))
    assert (qwen.head_dim, qwen.rms_norm_eps, qwen.rope_parameters["rope_theta"]) == (128, 1e-6, 1000000)
    assert (qwen.tie_word_embeddings, tied.tie_word_embeddings) == (False, True)
    mixtral = loaded(MODELS["mixtral", "8x7b"], tmp_path)
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok, mixtral.intermediate_size) == (8, 2, 14336)
    assert mixtral.sliding_window is None


def published_llama(**changes: object) -> dict[str, object]:
    """As transformers 4 wrote it: without head_dim, and with rotary settings of their own."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "bos_token_id": 128000,
        "max_position_embeddings": 4096,
        "pretraining_tp": 1,
    }
    return {name: value for name, value in {**config, **changes}.items() if value != "absent"}


def published_maverick(**changes: object) -> dict[str, object]:
    text = {**config_of(MAVERICK, "bf16"), "no_rope_layers": [], "moe_layers": None, "attn_temperature_tuning": 4}
    return {"model_type": "llama4", "text_config": {**text, **changes}, "vision_config": {"hidden_size": 7}}


def test_older_forms_are_understood() -> None:
    assert list(config_differences(LLAMA_8B, published_llama())) == []
    assert list(config_differences(MODELS["llama3", "70b"], published_llama())) != []
    assert list(config_differences(MAVERICK, published_maverick())) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; in llama3.1 8b it is False"),
        ({"vocab_size": 128257}, "vocab_size is 128257; in llama3.1 8b it is 128256"),
        ({"vocab_size": "absent"}, "vocab_size is None"),
        ({"num_key_value_heads": "absent"}, "num_key_value_heads is 32; in llama3.1 8b it is 8"),
        ({"num_attention_heads": 64}, "head_dim is 64"),
        ({"rope_theta": "absent"}, "rope_theta is 10000.0"),
        ({"rope_scaling": None}, "rope_scaling is None"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1.0"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights are unsupported"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is many"),
    ],
)
def test_every_difference_is_told(changes: dict[str, object], said: str) -> None:
    assert any(said in line for line in config_differences(LLAMA_8B, published_llama(**changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_qk_norm": None}, "use_qk_norm is True"),
        ({"moe_layers": list(range(48))}, "moe_layers is"),
        ({"no_rope_layers": [1] * 48}, "layer_types is"),
        ({"interleave_moe_layer_step": 1}, "moe_layers is"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None"),
        ({"attn_temperature_tuning": False}, "attn_temperature_tuning is False"),
        ({"num_local_experts": 16}, "num_local_experts is 16"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ],
)
def test_every_difference_of_llama4_is_told(changes: dict[str, object], said: str) -> None:
    assert any(said in line for line in config_differences(MAVERICK, published_maverick(**changes)))


@pytest.mark.parametrize(
    ("key", "changes", "said"),
    [
        (("qwen3", "0.6b"), {"tie_word_embeddings": False}, "tie_word_embeddings is False; in qwen3 0.6b it is True"),
        (("qwen3", "8b"), {"tie_word_embeddings": True}, "tie_word_embeddings is True; in qwen3 8b it is False"),
        (("qwen3", "8b"), {"use_sliding_window": True}, "use_sliding_window is True"),
        (("qwen3", "8b"), {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        (("mixtral", "8x7b"), {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; in mixtral 8x7b it is 2"),
        (("mixtral", "8x7b"), {"num_local_experts": 16}, "num_local_experts is 16"),
        (("mixtral", "8x7b"), {"sliding_window": 4096}, "sliding_window is 4096"),
    ],
)
def test_every_difference_of_qwen3_and_mixtral_is_told(
    key: tuple[str, str], changes: dict[str, object], said: str
) -> None:
    config = config_of(MODELS[key], "bf16")
    assert list(config_differences(MODELS[key], config)) == []
    assert any(said in line for line in config_differences(MODELS[key], {**config, **changes}))


def test_another_architecture_is_said_alone() -> None:
    (line,) = config_differences(NEMOTRON, published_llama())
    assert line == "model_type is llama; nemotron4 340b is nemotron"
    (line,) = config_differences(LLAMA_8B, published_maverick())
    assert line == "model_type is llama4; llama3.1 8b is llama"


def test_what_the_format_cannot_express_is_refused() -> None:
    assert MAVERICK.moe is not None
    experts = MAVERICK.moe.model_copy(update={"shared_ffn_hidden_size": 32})
    with pytest.raises(UsageError, match="no form in Hugging Face's formats; it is no Llama4ForCausalLM") as caught:
        config_of(MAVERICK.model_copy(update={"moe": experts}), "fp32")
    assert "moe.shared_ffn_hidden_size is 32, not 8192 as moe.ffn_hidden_size" in str(caught.value)
    with pytest.raises(UsageError, match="it has no chunked_attention"):
        config_of(MAVERICK.model_copy(update={"chunked_attention": None}), "fp32")
    with pytest.raises(UsageError, match=r"rotary_fraction is 0\.5, not 1"):
        config_of(LLAMA_8B.model_copy(update={"rotary_fraction": 0.5}), "fp32")

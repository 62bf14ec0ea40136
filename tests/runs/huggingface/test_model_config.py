# SPDX-License-Identifier: Apache-2.0
"""config.json: what transformers makes of ours, and what we make of theirs."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.runs.huggingface.model_config import config_differences, config_of, unknown_keys

MODELS = {key: model for key, model in Catalogue().models.items() if model.other_parts is None}
CLASSES = {
    "llama3.1": LlamaConfig,
    "llama3": LlamaConfig,
    "nemotron4": NemotronConfig,
    "llama4-maverick": Llama4TextConfig,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3 with experts": Qwen3MoeConfig,
}
LLAMA_8B = MODELS["llama3.1", "8b"]
MAVERICK = MODELS["llama4-maverick", "400b"]
NEMOTRON = MODELS["nemotron4", "340b"]


ALL_BIASES = {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}


def loaded(model: Model, folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config_of(model, "bf16")))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("model", "biases", "expected"),
    [
        (LLAMA_8B, {"qkv_bias": True}, Qwen2Config),
        (LLAMA_8B, ALL_BIASES, LlamaConfig),
        (NEMOTRON, ALL_BIASES, NemotronConfig),
        (MODELS["qwen3", "8b"], {"qkv_bias": True, "attention_output_bias": True}, Qwen3Config),
    ],
)
def test_biases_are_part_of_the_model(model: Model, biases: dict[str, bool], expected: type, tmp_path: Path) -> None:
    biased = model.model_copy(update={**biases, "rope_scaling": None})
    config = loaded(biased, tmp_path)
    assert type(config) is expected
    assert list(config_differences(biased, config.to_dict())) == []
    assert list(config_differences(model.model_copy(update={"rope_scaling": None}), config.to_dict()))


def test_a_part_that_no_form_names_is_no_form() -> None:
    with pytest.raises(UsageError, match="attention_output_bias is True, not False"):
        config_of(LLAMA_8B.model_copy(update={"attention_output_bias": True}), "bf16")


@pytest.mark.parametrize("key", MODELS, ids="-".join)
def test_transformers_reads_every_model_and_what_it_writes_is_the_same_model(
    key: tuple[str, str], tmp_path: Path
) -> None:
    model = MODELS[key]
    config = loaded(model, tmp_path)
    assert type(config) is CLASSES[f"{model.model} with experts" if model.moe and model.qk_norm else model.model]
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    for theirs in (written, config.to_dict()):
        assert list(config_differences(model, theirs)) == []
        assert list(unknown_keys(model, theirs)) == []


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


def of_catalogue(model: Model) -> Callable[..., dict[str, object]]:
    return lambda **changes: {**config_of(model, "bf16"), **changes}


QWEN3, TIED, MIXTRAL = (MODELS[key] for key in (("qwen3", "8b"), ("qwen3", "0.6b"), ("mixtral", "8x7b")))
PUBLISHED: dict[str, tuple[Model, Callable[..., dict[str, object]]]] = {
    "llama": (LLAMA_8B, published_llama),
    "llama4": (MAVERICK, published_maverick),
    "qwen3": (QWEN3, of_catalogue(QWEN3)),
    "qwen3-tied": (TIED, of_catalogue(TIED)),
    "mixtral": (MIXTRAL, of_catalogue(MIXTRAL)),
}
DIFFERENCES: list[tuple[str, dict[str, object], str]] = [
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings is True; in llama3.1 8b it is False"),
    ("llama", {"vocab_size": 128257}, "vocab_size is 128257; in llama3.1 8b it is 128256"),
    ("llama", {"vocab_size": "absent"}, "vocab_size is None"),
    ("llama", {"num_key_value_heads": "absent"}, "num_key_value_heads is 32; in llama3.1 8b it is 8"),
    ("llama", {"num_attention_heads": 64}, "head_dim is 64"),
    ("llama", {"rope_theta": "absent"}, "rope_theta is 10000.0"),
    ("llama", {"rope_scaling": None}, "rope_scaling is None"),
    ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1.0"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu"),
    ("llama", {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights are unsupported"),
    ("llama", {"num_hidden_layers": "many"}, "num_hidden_layers is many"),
    ("llama", {"rope_scaling": "llama3"}, "rope_scaling is llama3, which is not a JSON object"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 8}},
        "rope_scaling is {'rope_type': 'yarn', 'factor': 8}",
    ),
    ("llama", {"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "rope_scaling is {'rope_type': 'default'"),
    (
        "llama",
        {"rope_scaling": {"full_attention": {"rope_theta": 5e5}}},
        "is {'rope_type': 'default', 'full_attention'",
    ),
    ("llama4", {"use_qk_norm": None}, "use_qk_norm is True"),
    ("llama4", {"moe_layers": list(range(48))}, "moe_layers is"),
    ("llama4", {"no_rope_layers": [1] * 48}, "layer_types is"),
    ("llama4", {"layer_types": ["full_attention"] * 48}, "layer_types is"),
    ("llama4", {"interleave_moe_layer_step": 1}, "moe_layers is"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is None"),
    ("llama4", {"attn_temperature_tuning": False}, "attn_temperature_tuning is False"),
    ("llama4", {"num_local_experts": 16}, "num_local_experts is 16"),
    ("llama4", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ("qwen3-tied", {"tie_word_embeddings": False}, "tie_word_embeddings is False; in qwen3 0.6b it is True"),
    ("qwen3", {"tie_word_embeddings": True}, "tie_word_embeddings is True; in qwen3 8b it is False"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; in mixtral 8x7b it is 2"),
    ("mixtral", {"num_local_experts": 16}, "num_local_experts is 16"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
    ("qwen3", {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layer_types is ["),
    ("qwen3", {"num_hidden_layers": 10**15}, "num_hidden_layers is 1000000000000000;"),  # takes no memory
]


@pytest.mark.parametrize(("name", "changes", "said"), DIFFERENCES)
def test_every_difference_is_told(name: str, changes: dict[str, object], said: str) -> None:
    model, published = PUBLISHED[name]
    assert list(config_differences(model, published())) == []
    assert any(said in line for line in config_differences(model, published(**changes)))


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED["original_max_position_embeddings"] = 8192
ROTARY = {
    "rope_theta": ["absent", 500000.0, 10000.0],
    "rope_scaling": ["absent", None, {}, SCALED, {**SCALED, "rope_theta": 1e4}, {**SCALED, "factor": 32.0}],
    "rope_parameters": ["absent", None, {**SCALED, "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}],
}


def test_rotary_settings_pass_only_where_transformers_computes_the_same() -> None:
    """Each of them scales every angle of the model. Where two places contradict each other, neither is chosen."""
    wanted = {**SCALED, "rope_theta": 500000.0}
    refused_without_need = []
    for values in itertools.product(*ROTARY.values()):
        settings = dict(zip(ROTARY, values, strict=True))
        config = json.loads(json.dumps(published_llama(**settings)))
        ours = list(config_differences(LLAMA_8B, config)) == []
        theirs = LlamaConfig.from_dict(config).rope_parameters == wanted
        assert theirs or not ours, settings
        if theirs and not ours:
            refused_without_need.append(settings)
    assert refused_without_need
    assert all(settings["rope_parameters"]["rope_type"] == "default" for settings in refused_without_need)


@pytest.mark.parametrize(
    ("name", "changes", "unknown"),
    [
        ("llama", {"sliding_window": 4096}, ["sliding_window is 4096"]),
        ("llama", {"compression_config": {"bits": 4}}, ["compression_config is {'bits': 4}"]),
        ("llama", {"auto_map": {"AutoModel": "m.M"}}, ["auto_map is {'AutoModel': 'm.M'}"]),
        ("llama", {"sliding_window": None, "bos_token_id": 5, "pretraining_tp": 2}, []),
        ("llama", {"qkv_bias": False}, ["qkv_bias is False"]),
        ("llama", {"is_encoder_decoder": True, "pruned_heads": {}}, ["is_encoder_decoder is True, not False"]),
        ("mixtral", {"layer_types": ["full_attention"]}, ["layer_types is ['full_attention']"]),
        ("qwen3", {"max_window_layers": 36, "sliding_window": 4096, "layer_types": ["full_attention"] * 36}, []),
    ],
)
def test_keys_that_may_change_the_model_are_told(name: str, changes: dict[str, object], unknown: list[str]) -> None:
    model, _ = PUBLISHED[name]
    config = {**config_of(model, "bf16"), **changes}
    assert list(config_differences(model, config)) == []
    assert list(unknown_keys(model, config)) == unknown


def test_a_multimodal_model_is_read_from_its_text_model() -> None:
    known = {**published_maverick(), "boi_token_index": 7, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    assert list(config_differences(MAVERICK, known)) == []
    assert list(unknown_keys(MAVERICK, known)) == []
    assert list(unknown_keys(MAVERICK, {**known, "fusion": "early"})) == ["fusion is early"]
    assert list(unknown_keys(MAVERICK, published_maverick(lora_rank=8))) == ["lora_rank is 8"]
    assert list(config_differences(MAVERICK, {**known, "tie_word_embeddings": True})) != []
    assert list(config_differences(MAVERICK, {**known, "quantization_config": {"bits": 8}})) != []
    # What stands beside the text model is not the text model's.
    text = {name: value for name, value in config_of(MAVERICK, "bf16").items() if name != "rms_norm_eps"}
    assert list(config_differences(MAVERICK, {**known, "text_config": text, "rms_norm_eps": 1e-5})) != []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_no_value_of_any_key_ends_in_another_error(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([LLAMA_8B, MAVERICK, NEMOTRON, MODELS["qwen3", "8b"]]))
    config = config_of(model, "bf16")
    if model is MAVERICK and data.draw(st.booleans()):
        config = {**published_maverick(), "text_config": config}
    names = data.draw(st.lists(st.sampled_from([*config, "rope_parameters", "text_config", "other"]), max_size=4))
    changed = {**config, **{name: data.draw(JSON) for name in names}}
    differences = list(config_differences(model, changed))
    unknown = [] if differences else list(unknown_keys(model, changed))
    assert all(isinstance(line, str) for line in differences + unknown)


def test_another_architecture_is_said_alone() -> None:
    (line,) = config_differences(NEMOTRON, published_llama())
    assert line == "model_type is llama; nemotron4 340b is nemotron"
    (line,) = config_differences(LLAMA_8B, published_maverick())
    assert line == "model_type is llama4; llama3.1 8b is llama"


def test_what_the_format_cannot_express_is_refused() -> None:
    assert MAVERICK.moe is not None
    experts = MAVERICK.moe.model_copy(update={"shared_ffn_hidden_size": 32})
    with pytest.raises(UsageError, match="fits no Hugging Face format; the nearest is Llama4ForCausalLM") as caught:
        config_of(MAVERICK.model_copy(update={"moe": experts}), "fp32")
    assert "moe.shared_ffn_hidden_size is 32, not 8192 as moe.ffn_hidden_size" in str(caught.value)
    with pytest.raises(UsageError, match="the model has no chunked_attention"):
        config_of(MAVERICK.model_copy(update={"chunked_attention": None}), "fp32")
    with pytest.raises(UsageError, match=r"rotary_fraction is 0\.5, not 1"):
        config_of(LLAMA_8B.model_copy(update={"rotary_fraction": 0.5}), "fp32")

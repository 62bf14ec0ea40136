# SPDX-License-Identifier: Apache-2.0
"""Models described by a config.json: published ones of ten families, and every key that is not understood."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Model
from llmb.catalogue.throughput import parameter_count
from llmb.runs.huggingface.user_model import read_user_model

LLAMA3_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_SCALING["original_max_position_embeddings"] = 8192
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}


def config(model_type: str, sizes: str, **more: object) -> dict[str, Any]:
    """Return a configuration; ``sizes`` are hidden, intermediate, layers, heads, KV heads, vocabulary, positions."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = map(int, sizes.split())
    numbers = dict(zip((*names, "vocab_size", "max_position_embeddings"), values, strict=True))
    return {**COMMON, "model_type": model_type, **numbers, **more}


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1000000, "head_dim": 128, "attention_bias": False, "rope_scaling": None}
QWEN3 |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}
DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-6,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
KIMI = {**DEEPSEEK, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
KIMI |= {"num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
KIMI |= {"rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}}
GPT_OSS: dict[str, Any] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {**YARN, "rope_type": "yarn", "factor": 32.0, "truncate": False},
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
GPT_OSS["rope_scaling"].pop("type")
GLM: dict[str, Any] = {
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001}
MISTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096}
NEMOTRON = {"norm_eps": 1e-5, "hidden_act": "relu2", "head_dim": 128, "partial_rotary_factor": 0.5}
PHI = {"rms_norm_eps": 1e-5, "rope_theta": 250000, "rope_scaling": None, "sliding_window": None, "embd_pdrop": 0.0}
PHI |= {"resid_pdrop": 0.0, "original_max_position_embeddings": 16384, "attention_bias": False}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (
        config(
            *("llama", "4096 14336 32 32 8 128256 131072"),
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3_SCALING,
            mlp_bias=False,
        ),
        8_030_261_248,
    ),
    "Qwen3 8B": (config("qwen3", "4096 12288 36 32 8 151936 40960", **QWEN3), 8_190_735_360),
    "Qwen3 30B-A3B": (config("qwen3_moe", "2048 6144 48 32 4 151936 40960", **QWEN3, **MOE), 30_532_122_624),
    "gpt-oss 20B": (config("gpt_oss", "2880 2880 24 64 8 201088 131072", **GPT_OSS), 20_914_757_184),
    "DeepSeek-V3": (config("deepseek_v3", "7168 18432 61 128 128 129280 163840", **DEEPSEEK), 671_026_419_200),
    "Kimi K2": (config("kimi_k2", "7168 18432 61 64 64 163840 131072", **KIMI), 1_026_408_232_448),
    "GLM-4.5": (config("glm4_moe", "5120 12288 92 96 8 151552 131072", **GLM), 352_797_829_024),
    "Mistral 7B v0.1": (config("mistral", "4096 14336 32 32 8 32000 32768", **MISTRAL), 7_241_732_096),
    "Mixtral 8x7B": (
        config(
            *("mixtral", "4096 14336 32 32 8 32000 32768"),
            **{**MISTRAL, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8},
            num_experts_per_tok=2,
            output_router_logits=False,
            router_aux_loss_coef=0.02,
        ),
        46_702_792_704,
    ),
    "Phi-4": (config("phi3", "5120 17920 40 40 10 100352 16384", **PHI), 14_659_507_200),
    "Minitron 8B": (config("nemotron", "4096 16384 32 48 8 256000 4096", **NEMOTRON), 8_271_699_968),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma 2 9B": (config("gemma2", "3584 14336 42 16 8 256000 8192"), "model_type is gemma2"),
    "OLMo 2 7B": (config("olmo2", "4096 11008 32 32 32 100352 4096"), "model_type is olmo2"),
    "Phi-3 mini 128k": (
        config("phi3", "3072 8192 32 32 32 32064 131072", **PHI | {"rope_scaling": {"type": "longrope"}}),
        "rope_scaling has the type longrope; supported: default, llama3, yarn",
    ),
    "Qwen2.5 7B 1M": (
        config(
            *("qwen2", "3584 18944 28 28 4 152064 1010000"),
            rms_norm_eps=1e-5,
            rope_theta=1e7,
            dual_chunk_attention_config={"chunk_size": 262144},
        ),
        "dual_chunk_attention_config is {'chunk_size': 262144}",
    ),
}


def written(settings: dict[str, Any], folder: Path, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(settings))
    return path


def model_of(settings: dict[str, Any], folder: Path) -> Model:
    return read_user_model(written(settings, folder)).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str, tmp_path: Path) -> None:
    settings, parameters = PUBLISHED[name]
    assert parameter_count(model_of(settings, tmp_path))[0] == parameters


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_by_the_name_of_a_key(name: str, tmp_path: Path) -> None:
    settings, said = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        model_of(settings, tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


OF_CATALOGUE = {
    "Llama 3.1 8B": ("llama3.1", "8b"),
    "Qwen3 8B": ("qwen3", "8b"),
    "Qwen3 30B-A3B": ("qwen3", "30b"),
    "gpt-oss 20B": ("gpt_oss", "20b"),
    "DeepSeek-V3": ("deepseek-v3", "671b"),
    "Kimi K2": ("kimi-k2", "1t"),
    "Mixtral 8x7B": ("mixtral", "8x7b"),
}


@pytest.mark.parametrize("name", OF_CATALOGUE)
def test_it_is_the_model_that_the_catalogue_describes_by_hand(name: str, tmp_path: Path) -> None:
    theirs = Catalogue().models[OF_CATALOGUE[name]]
    same = {field: getattr(theirs, field) for field in ("model", "size", "source", "rotary_pairs")}
    assert model_of(PUBLISHED[name][0], tmp_path).model_copy(update=same) == theirs


def test_the_record_names_the_file_and_its_digest(tmp_path: Path) -> None:
    path = written(PUBLISHED["Qwen3 8B"][0], tmp_path, "My-Qwen_3.json")
    own = read_user_model(path)
    assert (own.file.path, own.model.size, own.model.model) == (str(path), "my-qwen_3", "qwen3")
    assert own.file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


LLAMA, QWEN, OSS = (PUBLISHED[name][0] for name in ("Llama 3.1 8B", "Qwen3 8B", "gpt-oss 20B"))
CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is gelu; only silu is supported"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096"),
    (LLAMA, {"auto_map": {"AutoModel": "m.M"}}, "auto_map is {'AutoModel': 'm.M'}"),
    (LLAMA, {"is_decoder": True}, "is_decoder is True, not False"),
    (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
    (LLAMA, {"num_hidden_layers": "many"}, "num_hidden_layers is many: "),
    (LLAMA, {"num_hidden_layers": 10**30}, "num_hidden_layers is 1000000000000000000000000000000: "),
    (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most 1000 are supported"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True: it must be a number"),
    (LLAMA, {"rope_theta": True}, "rope_theta is True: it must be a number"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide 32 heads"),
    (LLAMA, {"rope_scaling": 8}, "rope_scaling is 8, which is not a JSON object"),
    (LLAMA, {"rope_scaling": {**LLAMA3_SCALING, "beta": 1}}, "rope_scaling.beta is 1, an unknown setting"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor: "),
    (QWEN, {"rope_scaling": {"rope_type": "default", "factor": 2}}, "rope_scaling.factor is set, but the type is"),
    (LLAMA, {"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters differ"),
    (QWEN, {"use_sliding_window": True}, "use_sliding_window is True; only False is supported"),
    (QWEN, {"layer_types": ["sliding_attention"] * 36}, "layer_types is ["),
    (OSS, {"layer_types": ["full_attention", "sliding_attention"] * 12}, "only windows in the first of every 2 layers"),
    (PUBLISHED["Qwen3 30B-A3B"][0], {"num_local_experts": 8}, "two names of one setting, have different values"),
    (OSS, {"experts_per_token": 2}, "num_experts_per_tok is 4; only 2 is supported"),
    (PUBLISHED["DeepSeek-V3"][0], {"topk_method": "greedy"}, "topk_method is greedy; only noaux_tc is supported"),
    (PUBLISHED["DeepSeek-V3"][0], {"qk_rope_head_dim": None}, "qk_rope_head_dim is None; it must be a whole number"),
    (PUBLISHED["Mistral 7B v0.1"][0], {"sliding_window": "all"}, "sliding_window is all; it must be a whole number"),
]


@pytest.mark.parametrize(("settings", "changes", "said"), CHANGES)
def test_a_key_that_is_not_understood_is_refused_by_name(
    settings: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        model_of({**settings, **changes}, tmp_path)
    assert said in str(caught.value)


def test_a_window_is_a_part_that_the_engine_lacks_and_null_is_none(tmp_path: Path) -> None:
    mistral = PUBLISHED["Mistral 7B v0.1"][0]
    assert model_of(mistral, tmp_path).other_names == ("sliding window",)
    assert model_of({**mistral, "sliding_window": None}, tmp_path).other_parts is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a JSON object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "model_type is missing"),
        ('{"model_type": "llam"}', "valid: llama"),
        ('{"model_type": "llama", "head_dim": 64, "head_dim": 128}', "not valid JSON: 'head_dim' occurs twice"),
        ('{"model_type": ["llama"]}', "model_type is ['llama']"),
    ],
)
def test_a_file_that_is_no_configuration_ends_in_one_error(text: str, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_user_model(path)
    assert said in str(caught.value)


def test_the_name_of_the_file_is_the_size(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rename the file"):
        read_user_model(written(LLAMA, tmp_path, "my model.json"))
    with pytest.raises(UsageError, match="no such file"):
        read_user_model(tmp_path / "missing.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_of_any_key_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings, _ = data.draw(st.sampled_from([*PUBLISHED.values()]))
    keys = [*settings, "rope_parameters", "layer_types", "text_config", "other"]
    changes = {name: data.draw(JSON) for name in data.draw(st.lists(st.sampled_from(keys), max_size=4))}
    path = written({**settings, **changes}, tmp_path_factory.getbasetemp())
    try:
        parameter_count(read_user_model(path).model)
    except UsageError as error:
        assert str(path) in str(error)


DEFAULTS = ("llama", "mistral", "mixtral", "phi3", "gpt_oss", "deepseek_v3", "glm4_moe", "nemotron", "qwen2", "qwen3")


@pytest.mark.measured
@pytest.mark.parametrize("name", [*(name for name in PUBLISHED if name != "Kimi K2"), *DEFAULTS])
def test_transformers_counts_the_same_parameters(name: str, tmp_path: Path) -> None:
    """Of published configurations, and of the default of each type as transformers itself writes it."""
    torch = pytest.importorskip("torch")
    if name in PUBLISHED:
        settings, _ = PUBLISHED[name]
        theirs = AutoConfig.for_model(
            **{key: settings[key] for key in settings.keys() - {"quantization_config", "auto_map"}}
        )
    else:
        theirs = AutoConfig.for_model(name, num_key_value_heads=8)
        settings = json.loads(theirs.to_json_string())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    counted = sum(parameter.numel() for parameter in model.parameters())
    # Transformers keeps the bias that selects experts as a buffer.
    selects = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert counted + selects == parameter_count(model_of(settings, tmp_path))[0]

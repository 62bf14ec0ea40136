# SPDX-License-Identifier: Apache-2.0
"""Models of the catalogue as arguments of torchtitan 0.2.2's models, and how the two differ.

Each family below ``torchtitan.models`` has its own class of arguments (``torchtitan/models/<family>/model/args.py``).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llmb.catalogue.records import MixtureOfExperts, Model, OtherParts, Recipe, Router, Yarn
from llmb.runs.choices import DpSharding

NAME = "torchtitan"
RELEASE = "0.2.2"
TITAN = f"{NAME} {RELEASE}"
GPT_OSS_WINDOW_EVERY = 2
"""In torchtitan's gpt_oss, the first of every two layers has a window."""


class TitanModel(NamedTuple):
    """A model for torchtitan: the class of its arguments below ``torchtitan.models.<family>``, and their values."""

    family: str
    arguments: str
    values: dict[str, Any]
    rope_scaling: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None


class Family(NamedTuple):
    """A family of models: the fields of ``OtherParts`` that they need and may have, and the routers that it supports.

    With ``in_bf16``, the parameters of layers are always in bf16, and layers are never compiled.
    """

    needs: tuple[str, ...] = ()
    allows: tuple[str, ...] = ()
    routers: tuple[Router, ...] = ()
    has_pp: bool = True
    has_cp: bool = True
    in_bf16: bool = False


FAMILIES = {
    "llama3": Family(),
    "qwen3": Family(routers=("softmax-weighted-outputs",), has_pp=False),
    "gpt_oss": Family(
        needs=("attention_sinks", "sliding_window", "expert_biases", "clamped_glu"),
        allows=("yarn",),
        routers=("softmax-weighted-outputs",),
        has_pp=False,
        has_cp=False,
        in_bf16=True,
    ),
    "deepseek_v3": Family(
        needs=("latent_attention",),
        allows=("router_groups", "dense_layers", "multi_token_layers", "yarn"),
        routers=("sigmoid-weighted-outputs", "softmax-before-choice"),
        has_cp=False,  # with FlexAttention, which its own sizes from 16B on use
    ),
}


def family_name(model: Model) -> str:
    """Return the name of the family that is closest to ``model``."""
    if model.latent_attention:
        return "deepseek_v3"
    if model.other_parts and model.other_parts.attention_sinks:
        return "gpt_oss"
    return "qwen3" if model.qk_norm else "llama3"


def family_of(model: Model) -> Family:
    return FAMILIES[family_name(model)]


def titan_model(model: Model, layers: int) -> TitanModel:
    """Convert ``model`` with ``layers`` layers; it must have no ``model_problems``."""
    values = {
        "dim": model.hidden_size,
        "n_layers": layers,
        "n_heads": model.attention_heads,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "max_seq_len": model.max_seq_len,
    }
    if model.latent_attention:
        return _deepseek(model, values)
    values["n_kv_heads"] = model.kv_heads
    makers = {"gpt_oss": _gpt_oss, "qwen3": _qwen, "llama3": _llama}
    return makers[family_name(model)](model, values)


def _experts(moe: MixtureOfExperts, **others: Any) -> dict[str, Any]:  # noqa: ANN401 (values of torchtitan)
    scores = {"score_func": "softmax", "route_norm": True, "route_scale": 1.0, "score_before_experts": False}
    shared = (moe.shared_ffn_hidden_size or 0) // moe.ffn_hidden_size
    return {"num_experts": moe.experts, "num_shared_experts": shared, "top_k": moe.top_k, **scores, **others}


def _yarn(yarn: Yarn | None, fast: str, slow: str) -> dict[str, Any]:
    """Return the arguments of YaRN; ``fast`` and ``slow`` are the names of its betas. A factor of 1 turns it off."""
    if yarn is None:
        return {"rope_factor": 1.0}
    sizes = {"rope_factor": yarn.factor, "original_seq_len": yarn.original_max_position}
    return {**sizes, fast: yarn.beta_fast, slow: yarn.beta_slow}


def _deepseek(model: Model, values: dict[str, Any]) -> TitanModel:
    parts, moe = model.other_parts, model.moe
    assert parts and parts.latent_attention and moe, "model_problems rejects others"
    latent, groups, normalizes = parts.latent_attention, parts.router_groups, moe.router == "sigmoid-weighted-outputs"
    own = {
        "inter_dim": model.ffn_hidden_size,
        "moe_inter_dim": moe.ffn_hidden_size,
        "n_dense_layers": parts.dense_layers,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": model.head_dim - latent.nope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "attn_type": "flex",
        "mscale": parts.yarn.mscale if parts.yarn else 1.0,
        **_yarn(parts.yarn, "beta_fast", "beta_slow"),
    }
    experts = _experts(moe, score_func="sigmoid" if normalizes else "softmax", route_norm=normalizes)
    if groups:
        experts |= {"num_expert_groups": groups.groups, "num_limited_groups": groups.top_groups}
        experts["route_scale"] = groups.scaling_factor
    return TitanModel("deepseek_v3", "DeepSeekV3ModelArgs", {**values, **own}, experts=experts)


def _gpt_oss(model: Model, values: dict[str, Any]) -> TitanModel:
    parts, moe = model.other_parts, model.moe
    assert parts and parts.sliding_window and moe, "model_problems rejects others"
    own = {
        "head_dim": model.head_dim,
        "moe_inter_dim": moe.ffn_hidden_size,
        "sliding_window_size": parts.sliding_window.tokens,
        **_yarn(parts.yarn, "ntk_beta", "ntk_alpha"),
    }
    return TitanModel("gpt_oss", "GptOssModelArgs", {**values, **own}, experts=_experts(moe, gate_bias=True))


def _qwen(model: Model, values: dict[str, Any]) -> TitanModel:
    own = {**values, "head_dim": model.head_dim, "hidden_dim": model.ffn_hidden_size}
    own |= {"qk_norm": True, "enable_weight_tying": model.tied_embeddings}
    if model.moe is None:
        return TitanModel("qwen3", "Qwen3ModelArgs", own)
    own |= {"moe_enabled": True, "moe_inter_dim": model.moe.ffn_hidden_size}
    return TitanModel("qwen3", "Qwen3ModelArgs", own, experts=_experts(model.moe))


def _llama(model: Model, values: dict[str, Any]) -> TitanModel:
    scaling = model.rope_scaling
    assert scaling is not None, "model_problems rejects others"
    frequencies = {
        "scaling_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    # The feed-forward size, 8/3 of the hidden size, is rounded up to a multiple, which therefore can set any size.
    exact: dict[str, float | None] = {"ffn_dim_multiplier": None, "multiple_of": model.ffn_hidden_size}
    if model.ffn_hidden_size < 8 * model.hidden_size // 3:
        exact["ffn_dim_multiplier"] = model.ffn_hidden_size / (8 * model.hidden_size // 3)
    return TitanModel("llama3", "TransformerModelArgs", {**values, **exact}, frequencies)


def model_problems(model: Model) -> Iterator[str]:
    """Describe parts of a model that torchtitan's closest family lacks, and parts that it needs but the model lacks."""
    name = family_name(model)
    family, moe = FAMILIES[name], model.moe
    others = model.other_parts or OtherParts()
    llama, gpt_oss, deepseek = (name == each for each in ("llama3", "gpt_oss", "deepseek_v3"))
    parts = {part for part in OtherParts.model_fields if getattr(others, part)}
    own_heads = llama and model.head_dim * model.attention_heads != model.hidden_size
    biases = (model.qkv_bias, model.attention_output_bias, model.mlp_bias)
    has = {
        f"norm {model.norm}": model.norm != "rmsnorm",
        f"mlp {model.mlp}": model.mlp != "swiglu",
        "biases": not gpt_oss and any(biases),
        "experts": llama and moe is not None,
        "other experts": not llama and moe is not None and not _routes(moe, family, shares=deepseek),
        "no experts": (gpt_oss or deepseek) and moe is None,
        **{part.replace("_", " "): part not in family.needs + family.allows for part in sorted(parts)},
        **{f"no {part.replace('_', ' ')}": part not in parts for part in family.needs},
        "other biases": gpt_oss and biases != (True, True, False),
        "a window in other layers": gpt_oss and getattr(others.sliding_window, "every", None) != GPT_OSS_WINDOW_EVERY,
        "fewer KV heads than heads": deepseek and model.kv_heads != model.attention_heads,
        "norms of query and key": (gpt_oss or deepseek) and model.qk_norm is not None,
        "other scaled attention": gpt_oss and getattr(others.yarn, "mscale", 1) != 1,
        "chunked attention": model.chunked_attention is not None,
        "partial rotary embeddings": model.rotary_fraction != 1,
        "an embedding that is tied to the head": name != "qwen3" and model.tied_embeddings,
        f"heads of {model.head_dim} elements": own_heads,
        "unscaled rotary frequencies": llama and model.rope_scaling is None,
        "Llama 3.1's scaled rotary frequencies": not llama and model.rope_scaling is not None,
    }
    if differing := [part for part, differs in has.items() if differs]:
        yield f"{model.model} {model.size} has {', '.join(differing)}, unlike the models that llmb maps to torchtitan's"


def _routes(moe: MixtureOfExperts, family: Family, *, shares: bool) -> bool:
    """``shares`` permits a shared expert whose size is a multiple of the other experts'."""
    shared = moe.shared_ffn_hidden_size
    fits = shared is None or (shares and shared % moe.ffn_hidden_size == 0)
    return moe.router in family.routers and moe.interleave == 1 and fits


def trained_recipe(recipe: Recipe, sharding: DpSharding | None) -> Recipe:
    """Return the recipe as torchtitan trains it: without multi-token prediction, and with notes on other differences.

    If it had multi-token prediction, published figures do not apply, and are removed.
    """
    parts = recipe.model.other_parts
    recipe = recipe.model_copy(update={"decisions": (*recipe.decisions, *_differences(recipe, sharding))})
    if parts is None or not parts.multi_token_layers:
        return recipe
    why = f"{TITAN} has no multi-token prediction: {recipe.model_name} is trained without it"
    parts = parts.model_copy(update={"multi_token_layers": 0})
    changes = {"model": recipe.model.model_copy(update={"other_parts": parts}), "published_flops": None}
    none = {"expectations": (), "expectations_reason": why, "decisions": (*recipe.decisions, why)}
    return recipe.model_copy(update={**changes, **none})


def _differences(recipe: Recipe, sharding: DpSharding | None) -> Iterator[str]:
    model, parts = recipe.model, recipe.model.other_parts or OtherParts()
    if model.moe and not parts.router_groups:
        yield f"{TITAN} balances the experts with a bias in their selection"
    if family_of(model).in_bf16:
        yield f"{TITAN} holds the parameters of layers and their optimizer state in bf16, and does not compile layers"
    if sharding == "none" and recipe.layout.dp > 1:
        yield f"{TITAN} divides gradients by DP {recipe.layout.dp} twice if parameters are replicated (DDP)"
    if model.latent_attention:
        yield f"{TITAN} computes the last norm with torch's default epsilon, not {model.norm_eps:g}"
        if parts.yarn and recipe.layout.seq_len <= (shortest := parts.yarn.original_max_position):
            yield f"{TITAN} scales rotary frequencies (YaRN) only in sequences of more than {shortest} tokens"

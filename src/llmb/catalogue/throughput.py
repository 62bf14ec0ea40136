# SPDX-License-Identifier: Apache-2.0
"""Parameters and FLOPs of a model, and throughput, FLOP rate and MFU from a step time."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmb.catalogue.published import PublishedFlops
from llmb.catalogue.records import ADAPTED, Convention, Lora, MixtureOfExperts, Mlp, Model, Packing, Recipe

MATRICES: dict[Mlp, int] = {"swiglu": 3, "squared-relu": 2}
"""Number of matrices of each kind of feed-forward layer."""


def parameter_count(model: Model) -> tuple[int, int]:
    """Return the number of all parameters, and of active ones, without experts that the router does not choose."""
    vocabularies = 1 if model.tied_embeddings else 2
    outside = vocabularies * model.vocab_size * model.hidden_size + _norm(model)
    total, active = outside, outside
    for layer in range(model.layers):
        kind, hybrid = model.kind_of(layer), model.hybrid_layers
        always = len(kind) * _norm(model) + ("*" in kind) * _attention(model)
        if hybrid and kind == "M":
            always += hybrid.parameters(model.hidden_size)
        every_expert, chosen_experts = _feed_forward(model, layer) if "E" in kind else (0, 0)
        total += always + every_expert
        active += always + chosen_experts
    return total, active


def trainable_parameters(model: Model, lora: Lora | None) -> int:
    """Return the number of parameters with gradients: the adapters', or all without ``lora``. Adapted feed-forward
    layers must be dense."""
    if lora is None:
        return parameter_count(model)[0]
    shapes = _linear_shapes(model)
    adapted = [shapes[name] for name in ADAPTED[lora.targets] if name in shapes]
    # Each layer has its rows of B; a fused adapter has one A for all its layers.
    inputs = model.hidden_size if lora.fused else sum(inputs for inputs, _ in adapted)
    return model.layers * lora.rank * (inputs + sum(outputs for _, outputs in adapted))


def checkpoint_bytes(model: Model, lora: Lora | None = None) -> int:
    """Estimate the size of a checkpoint: each trainable parameter in fp32, with the two AdamW moments."""
    return 4 * 3 * trainable_parameters(model, lora)


def _linear_shapes(model: Model) -> dict[str, tuple[int, int]]:
    """Return the number of inputs and outputs of each linear layer of a block without experts."""
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    queries, keys = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    shapes |= {"o_proj": (queries, hidden), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return shapes | ({"gate_proj": (hidden, inner)} if model.mlp == "swiglu" else {})


def _attention(model: Model) -> int:
    per_head_norms = 2 * model.head_dim if model.qk_norm else 0
    latent = model.latent_attention
    norms = latent.query_rank + latent.key_value_rank if latent else per_head_norms
    sinks = model.attention_heads if model.other_parts and model.other_parts.attention_sinks else 0
    return _attention_matrices(model) + norms + sinks + _biases(model)


def _attention_matrices(model: Model) -> int:
    if latent := model.latent_attention:
        heads, rotary = model.attention_heads, model.head_dim - latent.nope_head_dim
        inputs = latent.query_rank or model.hidden_size
        queries = latent.query_rank * model.hidden_size + inputs * heads * model.head_dim
        keys_and_values = latent.key_value_rank * heads * latent.key_value_dim
        compressed = model.hidden_size * (latent.key_value_rank + rotary)
        return queries + compressed + keys_and_values + heads * latent.value_head_dim * model.hidden_size
    return 2 * model.hidden_size * model.head_dim * (model.attention_heads + model.kv_heads)


def _biases(model: Model) -> int:
    outputs = {name: outputs for name, (_, outputs) in _linear_shapes(model).items()}
    attention = {"q_proj": model.qkv_bias, "k_proj": model.qkv_bias, "v_proj": model.qkv_bias}
    attention |= {"o_proj": model.attention_output_bias}
    return sum(count for name, count in outputs.items() if attention.get(name, model.mlp_bias))


def _norm(model: Model) -> int:
    weight_and_bias = 2 if model.norm == "layernorm1p" else 1
    return weight_and_bias * model.hidden_size


def _feed_forward(model: Model, layer: int) -> tuple[int, int]:
    """Return two numbers of parameters of a feed-forward layer: with all experts, and with only the chosen ones."""
    matrices = MATRICES[model.mlp]
    if model.moe is None or not model.is_moe_layer(layer):
        dense = matrices * model.hidden_size * model.ffn_hidden_size
        return dense, dense
    moe = model.moe
    parts = model.other_parts
    latent = parts.latent_experts if parts else 0
    expert = matrices * (latent or model.hidden_size) * moe.ffn_hidden_size
    always = model.hidden_size * (moe.experts + matrices * (moe.shared_ffn_hidden_size or 0) + 2 * latent)
    if parts and parts.router_groups:
        always += moe.experts  # the bias of the selection
    if parts and parts.expert_biases:
        always += moe.experts
        expert += (matrices - 1) * moe.ffn_hidden_size + model.hidden_size
    return always + moe.experts * expert, always + moe.top_k * expert


PASSES = 3
FROZEN_PASSES = 2


def flops_per_sequence(
    recipe: Recipe, convention: Convention, *, lora: Lora | None = None, packing: Packing | None = None
) -> float | None:
    """Return the model FLOPs of one sequence; None without published FLOPs (``published``) or packing statistics
    (``packed``)."""
    model, seq_len = recipe.model, recipe.layout.seq_len
    if convention == Convention.PUBLISHED:
        return None if recipe.published_flops is None else published_flops(model, seq_len, recipe.published_flops)
    frozen = recipe.task == "lora"
    if convention != Convention.PACKED:
        base = model_flops(model, seq_len, causal=convention == Convention.CAUSAL, frozen=frozen)
        return base + adapter_flops(model, lora, seq_len)
    statistics = packing or recipe.packing
    if statistics is None:
        return None
    base = model_flops(model, seq_len, causal=False, frozen=frozen, packing=statistics)
    return base + adapter_flops(model, lora, statistics.tokens)


def adapter_flops(model: Model, lora: Lora | None, tokens: float) -> float:
    """Return the FLOPs of the adapters' matrices: three passes with one multiply-add per token and parameter."""
    return PASSES * 2 * trainable_parameters(model, lora) * tokens if lora else 0.0


def model_flops(
    model: Model, seq_len: int, *, causal: bool, frozen: bool = False, packing: Packing | None = None
) -> float:
    """Return the model FLOPs of one sequence. ``causal`` halves the attention square; ``frozen`` excludes gradients of
    weights."""
    tokens = packing.tokens if packing else seq_len
    passes = FROZEN_PASSES if frozen else PASSES
    head = model.hidden_size * model.vocab_size
    weights = sum(_layer_weights(model, layer) for layer in range(model.layers)) + head
    squares = [attention_square(model, attends_all, seq_len, packing) for attends_all in (False, True)]
    scores = sum(squares[model.is_global_layer(layer)] for layer in range(model.layers) if "*" in model.kind_of(layer))
    for _ in range(model.multi_token_layers):
        last = model.layers - 1
        weights += _layer_weights(model, last) + 2 * model.hidden_size**2 + head
        weights += _attention_matrices(model) if model.hybrid_layers else 0  # in a layer before that with experts
        scores += squares[model.is_global_layer(last)]
    latent = model.latent_attention
    width = model.attention_heads * ((model.head_dim + latent.value_head_dim) / 2 if latent else model.head_dim)
    scans = _scan_flops(model) * tokens
    return passes * 2 * weights * tokens + PASSES * (4 * width * scores * (0.5 if causal else 1.0) + scans)


def _scan_flops(model: Model) -> int:
    """Return the FLOPs of the scans of all Mamba layers for one token and pass, as Megatron-Bridge counts them."""
    if (hybrid := model.hybrid_layers) is None:
        return 0
    layers = sum(model.kind_of(layer) == "M" for layer in range(model.layers))
    return 7 * hybrid.inner_size * hybrid.state_dim * layers


def published_flops(model: Model, seq_len: int, source: PublishedFlops) -> float:
    """Return the FLOPs of one sequence as the document counts them, including its errors."""
    if source.printed_flops is not None:
        return source.printed_flops
    as_published = model.model_copy(update=source.as_published)
    if source.formula == "two thirds of causal":
        return model_flops(as_published, seq_len, causal=True) * 2 / 3
    return model_flops(as_published, seq_len, causal=source.formula == "causal")


def _layer_weights(model: Model, layer: int) -> int:
    """Return the weights of a layer that multiply a token, without the router (under 0.5 %)."""
    kind, hybrid, moe, matrices = model.kind_of(layer), model.hybrid_layers, model.moe, MATRICES[model.mlp]
    if hybrid and kind == "M":
        return hybrid.matrices(model.hidden_size)
    weights = _attention_matrices(model) if "*" in kind else 0
    if "E" not in kind:
        return weights
    if moe is None or not model.is_moe_layer(layer):
        return weights + matrices * model.hidden_size * model.ffn_hidden_size
    latent = model.other_parts.latent_experts if model.other_parts else 0
    others = model.hidden_size * (matrices * (moe.shared_ffn_hidden_size or 0) + 2 * latent)
    return weights + _routed_weights(model, moe) + others


def _routed_weights(model: Model, moe: MixtureOfExperts) -> int:
    latent = model.other_parts.latent_experts if model.other_parts else 0
    return MATRICES[model.mlp] * moe.top_k * moe.ffn_hidden_size * (latent or model.hidden_size)


def routed_share(model: Model, seq_len: int) -> float:
    """Return the fraction of all layers' FLOPs that routed experts compute, with causal attention and without
    multi-token prediction."""
    if model.other_parts:
        parts = model.other_parts.model_copy(update={"multi_token_layers": 0})
        model = model.model_copy(update={"other_parts": parts})
    head = model.hidden_size * model.vocab_size
    layers = model_flops(model, seq_len, causal=True) / (PASSES * 2 * seq_len) - head
    number = sum(map(model.is_moe_layer, range(model.layers)))
    return _routed_weights(model, model.moe) * number / layers if model.moe else 0.0


def attention_square(model: Model, attends_all: bool, seq_len: int, packing: Packing | None) -> float:
    """Return the number of position pairs that a layer compares in a sequence, including the masked causal half."""
    window, chunked = model.other_parts and model.other_parts.sliding_window, model.chunked_attention
    if window and not attends_all and seq_len > window.tokens:
        return 2 * seq_len * window.tokens - window.tokens**2
    if packing:
        chunked_sum = packing.chunked_sum_of_squares
        return packing.sum_of_squares if chunked_sum is None or attends_all else chunked_sum
    if chunked is None or attends_all or seq_len <= chunked.chunk_size:
        return seq_len**2
    chunks, rest = divmod(seq_len, chunked.chunk_size)
    return chunks * chunked.chunk_size**2 + rest**2


SECONDS_PER_DAY = 86_400
MOST_MFU_PCT = 100.0
MFU = "mfu_pct"
"""The key of the MFU in ``reasons``."""
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Throughput:
    """The metrics that follow from a step time. ``reasons`` has the reason for each metric that is None."""

    tokens_per_s: float
    """Rate of all positions, including padding."""
    tokens_per_s_per_gpu: float
    real_tokens_per_s: float
    """Rate of positions without padding; equal to ``tokens_per_s`` if sequences are not packed."""
    flops_per_sequence: dict[str, float | None]
    tflops_per_gpu: dict[str, float | None]
    mfu_pct: dict[str, float | None]
    peak_tflops: float | None
    days_per_1t_tokens: float | None
    reasons: dict[str, str]


def throughput(
    recipe: Recipe, step_time_s: float, *, lora: Lora | None = None, packing: Packing | None = None
) -> Throughput:
    """Return metrics for a step time: MFU = GBS x model FLOPs / (step time x GPUs x peak)."""
    layout = recipe.layout
    tokens_per_s = layout.gbs * layout.seq_len / step_time_s
    counted = {item.value: flops_per_sequence(recipe, item, lora=lora, packing=packing) for item in Convention}
    statistics = packing or recipe.packing
    per_gpu = layout.gbs / step_time_s / layout.gpus / TERA
    tflops = {name: None if value is None else value * per_gpu for name, value in counted.items()}
    peak = recipe.peak_tflops
    too_fast = why_too_fast(tflops, peak)
    mfu = {
        name: None if value is None or peak is None or value > peak else 100 * value / peak
        for name, value in tflops.items()
    }
    return Throughput(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / layout.gpus,
        real_tokens_per_s=layout.gbs * statistics.tokens / step_time_s if statistics else tokens_per_s,
        flops_per_sequence=counted,
        tflops_per_gpu=tflops,
        mfu_pct=mfu,
        peak_tflops=peak,
        days_per_1t_tokens=None if recipe.proxy else 1e12 / tokens_per_s / SECONDS_PER_DAY,
        reasons=_reasons(recipe, counted) | ({MFU: too_fast} if too_fast else _beyond_peak(tflops, peak)),
    )


def why_too_fast(tflops_per_gpu: Mapping[str, float | None], peak_tflops: float | None) -> str | None:
    """Return why a step time is impossible; None if it is possible or the peak is unknown."""
    tflops = {name: value for name, value in tflops_per_gpu.items() if value is not None}
    if not tflops or not peak_tflops:
        return None
    name = min(tflops, key=tflops.__getitem__)
    pct = 100 * tflops[name] / peak_tflops
    if pct <= MOST_MFU_PCT:
        return None
    return f"the MFU would be {pct:,.1f} % ({name}): the step time, the work per step or the GPU is wrong"


def _beyond_peak(tflops: Mapping[str, float | None], peak: float | None) -> dict[str, str]:
    """Return the reason for each convention above the peak: it counts skipped work, such as masked attention."""
    beyond = [name for name, value in tflops.items() if value and peak and value > peak]
    return {f"{MFU}.{name}": "above the peak, because it counts work that is skipped" for name in beyond}


def _reasons(recipe: Recipe, flops: dict[str, float | None]) -> dict[str, str]:
    reasons = {}
    if flops[Convention.PUBLISHED] is None:
        reasons["published"] = f"no document counts the FLOPs of {recipe.workload} {recipe.size} in this shape"
    if flops[Convention.PACKED] is None:
        reasons["packed"] = unpacked_reason(recipe)
    if recipe.peak_tflops is None:
        device = "a CPU" if recipe.gpu_type == "cpu" else recipe.gpu_type
        reasons[MFU] = f"the catalogue has no {recipe.dtype} peak for {device}"
    if recipe.proxy:
        reasons["days_per_1t_tokens"] = f"a proxy is not the model: {recipe.proxy_text}"
    return reasons


def unpacked_reason(recipe: Recipe) -> str:
    """Return why the FLOPs of packed sequences are unknown."""
    if recipe.task == "pretrain":
        return "sequences are not packed from documents"
    return f"no statistics of packed sequences of {recipe.layout.seq_len} tokens are known"

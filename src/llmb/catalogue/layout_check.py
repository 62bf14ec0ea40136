# SPDX-License-Identifier: Apache-2.0
"""Computes a rank's part of a model and the layers of stages, and why a layout is invalid."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from llmb.catalogue.records import PARALLEL, Layout, Model

SIZES = (*PARALLEL, "gpus", "mbs", "gbs", "seq_len", "layers")
"""Fields of a layout that must be at least 1."""


def rank_model(model: Model, layout: Layout) -> Model:
    """Return the model with only the heads, features, vocabulary and experts that one rank holds, but all layers."""
    divided = ("attention_heads", "kv_heads", "ffn_hidden_size", "vocab_size")
    sizes: dict[str, object] = {name: getattr(model, name) // layout.tp for name in divided}
    if moe := model.moe:
        shared = moe.shared_ffn_hidden_size and moe.shared_ffn_hidden_size // layout.tp
        own = {"experts": moe.experts // layout.ep, "ffn_hidden_size": moe.ffn_hidden_size // layout.etp}
        sizes["moe"] = moe.model_copy(update={**own, "shared_ffn_hidden_size": shared})
    return model.model_copy(update=sizes)


def stage_layers(layout: Layout) -> list[range]:
    """Return the layers of every stage, in the order in which a token passes them."""
    bounds = accumulate(stage_sizes(layout), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def stage_counts(layout: Layout) -> list[int] | None:
    """Return the number of layers of each stage; None if another program splits them unevenly."""
    divides = layout.has_custom_split or layout.pipeline_layers % (layout.pp * layout.vp) == 0
    return [len(stage) for stage in stage_layers(layout)] if divides else None


def stage_sizes(layout: Layout) -> list[int]:
    """Return the number of layers of each of the PP x VP stages, in the order of the model's layers."""
    stages = layout.pp * layout.vp
    if layout.pipeline_layers != layout.layers:
        first_stage, *middle, last_stage = _split(layout.pipeline_layers, stages)
        return [first_stage - 1, *middle, last_stage - 1]
    first, last = end_stage_sizes(layout)
    equal_stages = stages - len(first) - len(last)
    return [*first, *_split(layout.layers - sum(first) - sum(last), equal_stages), *last]


def _split(layers: int, stages: int) -> list[int]:
    equal, rest = divmod(layers, max(1, stages))
    return [equal + (0 < stage <= rest) for stage in range(stages)]


def rank_stages(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Return the indices of the stages that a pipeline rank holds: every PP-th stage."""
    return tuple(range(pp_rank, layout.pp * layout.vp, layout.pp))


def end_stage_sizes(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the number of layers set for the first and for the last stage; empty lists if unset."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    return [first] if first is not None else [], [last] if last is not None else []


def check_layout(model: Model, layout: Layout) -> list[str]:
    """Return reasons why ``model`` cannot be trained with ``layout``; empty if it can."""
    sizes = ((name, getattr(layout, name)) for name in SIZES)
    small = [f"{name} is {value}; it must be at least 1" for name, value in sizes if value < 1]
    if small:
        return small
    batch = list(_batch(layout))
    pipeline = _pipeline(model, layout, batch_divides=not batch)
    return [*batch, *_tensor(model, layout), *pipeline, *_context(layout), *_experts(model, layout)]


def _batch(layout: Layout) -> Iterator[str]:
    ranks = layout.tp * layout.pp * layout.cp
    if layout.gpus % ranks:
        product = f"TP x PP x CP = {layout.tp} x {layout.pp} x {layout.cp} = {ranks}"
        yield f"number of GPUs {layout.gpus} is not divisible by {product}"
        return
    samples = layout.mbs * layout.dp
    if layout.gbs < samples:
        yield f"GBS {layout.gbs} is below MBS x DP = {layout.mbs} x {layout.dp} = {samples}"
    elif layout.gbs % samples:
        yield f"GBS {layout.gbs} is not divisible by MBS x DP = {layout.mbs} x {layout.dp} = {samples}"


def _tensor(model: Model, layout: Layout) -> Iterator[str]:
    tp = layout.tp
    parts = {
        "number of attention heads": model.attention_heads,
        "number of KV heads": model.kv_heads,
        **({} if all(map(model.is_moe_layer, range(model.layers))) else {"FFN size": model.ffn_hidden_size}),
        "vocabulary size": model.vocab_size,
    }
    if layout.sequence_parallel:
        parts["sequence length"] = layout.seq_len
    if model.moe is not None and model.moe.shared_ffn_hidden_size is not None:
        parts["shared expert's FFN size"] = model.moe.shared_ffn_hidden_size
    if model.attention_heads % model.kv_heads:
        yield f"number of attention heads {model.attention_heads} is not divisible by {model.kv_heads} KV heads"
    for name, value in parts.items():
        if value % tp:
            yield f"{name} {value} is not divisible by TP {tp}"
    if not layout.sequence_parallel and tp == 1:
        yield "TP 1 has no sequence parallelism to disable"
    elif not layout.sequence_parallel and model.moe is not None:
        yield f"experts with TP {tp} need sequence parallelism: without it each of {tp} ranks routes the same tokens"


def _pipeline(model: Model, layout: Layout, *, batch_divides: bool) -> Iterator[str]:
    stages = layout.pp * layout.vp
    if layout.vp > 1 and layout.pp == 1:
        yield f"VP {layout.vp} needs PP above 1"
    elif layout.has_custom_split:
        yield from _custom_split(layout)
    elif layout.pipeline_layers % stages and model.other_parts is None:  # other programs split unevenly
        counted = " (embedding and loss counted)" if layout.pipeline_layers != layout.layers else ""
        split = f"PP x VP = {layout.pp} x {layout.vp} = {stages}"
        yield f"number of layers {layout.pipeline_layers}{counted} is not divisible by {split}"
    if batch_divides and layout.vp > 1 and layout.ga % layout.pp:
        yield f"GA {layout.ga} is not divisible by PP {layout.pp}, which interleaved 1F1B requires"


def _custom_split(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        yield "a number of layers for the first or last stage needs PP above 1"
        return
    first, last = end_stage_sizes(layout)
    layers, stages = sum(first) + sum(last), layout.pp * layout.vp - len(first) - len(last)
    rest = layout.layers - layers
    if min(*first, *last, rest, 0) < 0:
        yield f"the first and the last stage cannot hold {layers} of {layout.layers} layers"
    elif rest % stages if stages else rest:
        yield f"the other {rest} layers are not divisible by the {stages} stages that hold them"


def _context(layout: Layout) -> Iterator[str]:
    if layout.cp > 1 and layout.seq_len % (2 * layout.cp):
        yield f"sequence length {layout.seq_len} is not divisible by 2 x CP = {2 * layout.cp}"
    elif layout.sequence_parallel and layout.seq_len % layout.tp == 0 and layout.seq_len // layout.cp % layout.tp:
        yield f"sequence length of one CP rank {layout.seq_len // layout.cp} is not divisible by TP {layout.tp}"


def _experts(model: Model, layout: Layout) -> Iterator[str]:
    if model.moe is None:
        if layout.ep > 1 or layout.etp > 1:
            yield f"EP {layout.ep} and ETP {layout.etp} need a model with experts; {model.model} has none"
        return
    if model.moe.experts % layout.ep:
        yield f"number of experts {model.moe.experts} is not divisible by EP {layout.ep}"
    if model.moe.ffn_hidden_size % layout.etp:
        yield f"experts' FFN size {model.moe.ffn_hidden_size} is not divisible by ETP {layout.etp}"
    ranks = layout.etp * layout.ep * layout.pp
    if layout.gpus % ranks:
        product = f"ETP x EP x PP = {layout.etp} x {layout.ep} x {layout.pp} = {ranks}"
        yield f"number of GPUs {layout.gpus} is not divisible by {product}"

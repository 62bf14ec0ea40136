# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model's parts on one rank, saved activations, and peak moments of a pipeline rank."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby, zip_longest
from math import ceil
from operator import ge
from typing import NamedTuple

from llmb.catalogue.layout_check import rank_model
from llmb.catalogue.records import ADAPTED, ENGINE_DTYPES, Layout, MixtureOfExperts, Model
from llmb.catalogue.throughput import MATRICES
from llmb.runs.plan import EnginePlan

BF16, FP32 = 2, 4
"""Bytes per element; FP8 has one."""


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns] of a forward pass; ``together``: number of them in one call."""

    name: str
    rows: int
    inner: int
    columns: int
    together: int = 1


def block_products(
    model: Model, layout: Layout, *, experts: bool, capacity_factor: float | None = None
) -> Iterator[Product]:
    """Yield the products of a block on one rank; projections that an engine can fuse count as one."""
    part, tokens, hidden = rank_model(model, layout), layout.mbs * layout.seq_len // layout.cp, model.hidden_size
    queries, keys = part.attention_heads * model.head_dim, part.kv_heads * model.head_dim
    if latent := model.latent_attention:
        yield Product("latents", tokens // layout.tp, hidden, latent_features(model))
        yield Product("query", tokens, latent.query_rank or hidden, queries)
        yield Product("key_value", tokens, latent.key_value_rank, part.attention_heads * latent.key_value_dim)
        queries = part.attention_heads * latent.value_head_dim
    else:
        yield Product("qkv", tokens, hidden, queries + 2 * keys)
    yield Product("attention_output", tokens, queries, hidden)
    moe = part.moe if experts else None
    if moe is None:
        yield from _feed_forward("", model, tokens, part.ffn_hidden_size)
        return
    rows = ceil(expert_rows(model, layout, capacity_factor) / moe.experts)
    yield from _feed_forward("expert_", model, rows, moe.ffn_hidden_size, moe.experts)
    if moe.shared_ffn_hidden_size:
        yield from _feed_forward("shared_", model, tokens, moe.shared_ffn_hidden_size)


def latent_features(model: Model) -> int:
    """Return the number of features of a token's latent vectors, which are not sharded; 0 without latent attention."""
    latent = model.latent_attention
    return latent.query_rank + latent.key_value_rank + model.head_dim - latent.nope_head_dim if latent else 0


def _feed_forward(prefix: str, model: Model, rows: int, features: int, together: int = 1) -> Iterator[Product]:
    ups = MATRICES[model.mlp] - 1
    yield Product(f"{prefix}{'gate_up' if ups > 1 else 'up'}", rows, model.hidden_size, ups * features, together)
    yield Product(f"{prefix}down", rows, features, model.hidden_size, together)


def head_product(model: Model, layout: Layout) -> Product:
    tokens = layout.mbs * layout.seq_len // layout.cp
    return Product("logits", tokens, model.hidden_size, rank_model(model, layout).vocab_size)


def expert_rows(model: Model, layout: Layout, capacity_factor: float | None) -> int:
    """Return the rows of a rank's experts for a micro-batch; 0 if the model has no experts."""
    if model.moe is None:
        return 0
    shard = layout.mbs * layout.seq_len // layout.cp // layout.tp
    return ceil(shard * model.moe.top_k * (capacity_factor or 1)) * layout.etp


class Sizes:
    """Numbers of tokens of a micro-batch, and of features, on one rank. Biases and norms of heads are not counted."""

    def __init__(self, plan: EnginePlan) -> None:
        model, layout = plan.recipe.model, plan.recipe.layout
        self.plan, self.model, self.layout = plan, model, layout
        self.part = part = rank_model(model, layout)
        self.fp8 = plan.fp8_recipe is not None or plan.recipe.dtype not in ENGINE_DTYPES
        self.hidden = model.hidden_size
        self.tokens = layout.mbs * layout.seq_len // layout.cp
        self.shard = self.tokens // layout.tp
        """Tokens per tensor-parallel rank."""
        self.between = self.tokens // layout.sequence_shards
        """Tokens of this rank between layers."""
        self.query = part.attention_heads * model.head_dim
        self.key = self.value = part.kv_heads * model.head_dim
        self.attended = self.query
        self.latents = latent_features(model)
        if latent := model.latent_attention:
            self.key = self.query
            self.value = self.attended = part.attention_heads * latent.value_head_dim
        self.vocabulary = part.vocab_size
        self.norm = model.hidden_size * (2 if model.norm == "layernorm1p" else 1)
        self.products = MATRICES[model.mlp] - 1
        """Number of matrices of a feed-forward layer before its activation."""

    @cached_property
    def alike(self) -> Sequence[int]:
        """The first layer with the same sizes, for each layer."""
        first: dict[object, int] = {}
        model, layers = self.model, range(self.model.layers)
        kinds = [(*map(part, layers),) for part in (model.kind_of, model.is_moe_layer, model.is_global_layer)]
        every = zip(*kinds, map(self.computes_fp8, layers), strict=True)
        return [first.setdefault(kind, layer) for layer, kind in enumerate(every)]

    def attention_matrices(self) -> int:
        if latent := self.model.latent_attention:
            heads = (latent.query_rank or self.hidden) * self.query
            heads += latent.key_value_rank * self.part.attention_heads * latent.key_value_dim
            return self.hidden * (self.latents + self.attended) + heads
        return 2 * self.hidden * (self.query + self.key)

    def dense_matrices(self, features: int) -> int:
        return (self.products + 1) * self.hidden * features

    def multi_token(self, stages: int) -> int:
        """Return the number of elements outside of blocks that multi-token prediction adds, given the number of
        ``stages``."""
        table = self.vocabulary * self.hidden if self.model.multi_token_layers and stages > 1 else 0
        return self.model.multi_token_layers * 2 * self.hidden**2 + table

    def expert_matrices(self) -> int:
        moe = self.part.moe
        return 0 if moe is None else 3 * self.hidden * moe.experts * moe.ffn_hidden_size

    def matrices(self, layer: int) -> int:
        """Count the elements of the matrices of a block, without routed experts."""
        moe = self.part.moe
        if moe is None or not self.model.is_moe_layer(layer):
            return self.attention_matrices() + self.dense_matrices(self.part.ffn_hidden_size)
        return self.attention_matrices() + self.dense_matrices(moe.shared_ffn_hidden_size or 0)

    def others(self, layer: int) -> int:
        """Count the elements of a block that are never cast to FP8: norms and a router."""
        moe = self.model.moe
        router = moe.experts * self.hidden if moe and self.model.is_moe_layer(layer) else 0
        return 2 * self.norm + router

    def adapters(self) -> int:
        """Count the elements of the adapters of a block: A and B, one of them sharded by tensor parallelism."""
        lora, inner = self.plan.lora, self.part.ffn_hidden_size
        if lora is None:
            return 0
        inputs = {"o_proj": self.query, "down_proj": inner}
        outputs = {"q_proj": self.query, "k_proj": self.key, "v_proj": self.key, "o_proj": self.hidden}
        outputs |= {"gate_proj": inner, "up_proj": inner, "down_proj": self.hidden}
        names = ADAPTED[lora.targets]
        shared = self.hidden if lora.fused else sum(inputs.get(name, self.hidden) for name in names)
        return lora.rank * (shared + sum(outputs[name] for name in names))

    def computes_fp8(self, layer: int) -> bool:
        """Return whether a block computes in FP8; with the FP8 recipe ``current``, the first and last blocks do not."""
        return self.fp8 and not (self.plan.fp8_recipe == "current" and layer in (0, self.model.layers - 1))

    def saved_bytes(self, layer: int) -> int:
        """Return the bytes that a block saves of a micro-batch for its backward pass."""
        if self.plan.recompute == "full":
            return BF16 * self.hidden * self.shard
        return self.computed(layer)

    def computed(self, layer: int) -> int:
        """Return the bytes that a block saves unless it is recomputed in full."""
        between = BF16 * self.hidden * self.shard
        fp8, trained = self.computes_fp8(layer), self.plan.lora is None
        attended = self.attended * self.tokens
        heads = BF16 * self.tokens * (self.query + (self.key + self.value) * self.layout.cp) + BF16 * (
            self.latents * self.shard
        )
        sums = FP32 * self.tokens * self.query // self.model.head_dim
        if self.keeps_gathered(layer):
            again = BF16 * self.tokens * (self.query if self.layout.cp > 1 else self.key)
            return 2 * between + heads + BF16 * attended + sums + 2 * BF16 * self.hidden * self.tokens - again
        # Inputs of norms; inputs of products, for the gradients of their weights.
        saved = 2 * between + heads + BF16 * attended + sums
        if self.model.qk_norm is not None:
            saved += BF16 * (attended + 2 * self.key * self.tokens)  # the product, which norms of heads read
        if self.plan.recompute == "selective":
            saved += BF16 * self.tokens * self._selected_heads(joined=fp8 or not self.is_sharded)
        normed = 0 if self.plan.recompute == "selective" and not fp8 else 1 if fp8 else BF16  # recomputed
        of_input = self.hidden * self.shard * normed
        moe = self.part.moe if self.model.is_moe_layer(layer) else None
        if trained:
            casts_again = self.plan.fp8_recipe == "delayed" and self.layout.pp > 1  # as apply_fp8 decides
            saved += of_input + (attended if fp8 and not casts_again else 0)
            saved += of_input if moe is None else BF16 * self.hidden * self.shard
        else:
            saved += between  # an adapter's input
        if moe is None:
            return saved + self._saved_inside(self.part.ffn_hidden_size, self.tokens, fp8, trained)
        saved += self._saved_by_experts(moe, fp8, trained)
        if moe.shared_ffn_hidden_size:
            saved += self._saved_inside(moe.shared_ffn_hidden_size, self.tokens, fp8, trained)
            saved += self.hidden * self.shard if fp8 else 0
        return saved

    def _selected_heads(self, *, joined: bool) -> int:
        normed, gathers = self.model.qk_norm is not None, self.layout.cp > 1
        if not joined:
            return -(self.query * gathers + self.key) if normed else 0
        return (0 if normed else self.query + 2 * self.key) - (self.query if gathers else self.key)

    def _saved_by_experts(self, moe: MixtureOfExperts, fp8: bool, trained: bool) -> int:
        """Return the bytes that experts save; they are not compiled, so ``selective`` saves all results of products and
        exchanges."""
        features, rows = moe.ffn_hidden_size, self.expert_rows()
        if self.plan.recompute == "selective":
            products = BF16 * rows * (self.products * features + self.hidden)
            return products + BF16 * self.hidden * (rows // self.layout.etp + 2 * self._exchanged_rows)
        weighted = BF16 * self.hidden * self.shard * moe.top_k * (moe.router == "softmax-weighted-outputs")
        return self._saved_inside(features, rows, fp8, trained) + self.hidden * rows * (1 if fp8 else BF16) + weighted

    @property
    def _exchanged_rows(self) -> int:
        """Number of rows that the exchanges before experts return: first over ranks of EP, then over ranks of ETP."""
        if self.layout.ep * self.layout.etp == 1:
            return 0
        rows = self.expert_rows()
        return rows // self.layout.etp + (rows if self.layout.etp > 1 else 0)

    def _saved_inside(self, features: int, rows: int, fp8: bool, trained: bool) -> int:
        """Return the bytes that a feed-forward layer saves of its activation function's input and output."""
        computed = (1 if fp8 else BF16) if trained else 0
        again = 0 if self.plan.recompute == "selective" and not fp8 else computed
        return rows * features * (BF16 * self.products + again)

    def expert_rows(self) -> int:
        return expert_rows(self.model, self.layout, self.plan.capacity_factor)

    def working(self, layer: int) -> int:
        """Return the bytes that the backward pass of a block needs on top of what all blocks save."""
        if self.part.moe and self.model.is_moe_layer(layer):
            return self._working_of_experts(layer, self.part.moe)
        whole = BF16 * self.hidden * self.tokens
        again = self.computed(layer) if self.plan.recompute == "full" else 0
        # Gradients of the activation's input, and its output, which a gradient of weights needs.
        gradient = BF16 * ((self.plan.lora is None) + self.products) * self._inner
        # Compiled code returns the gradients of a block's matrices together, unless products accumulate them.
        of_matrices = 0 if self.adds_in_products or self.plan.lora else BF16 * self.matrices(layer)
        if self.keeps_gathered(layer):
            again += BF16 * self.products * self._inner
        return again + max(gradient + 2 * whole, of_matrices + BF16 * self.hidden * self.shard)

    def _working_of_experts(self, layer: int, moe: MixtureOfExperts) -> int:
        """Return the bytes that the backward pass of experts needs, including recomputed activations."""
        parts = self.plan.compute_path.dispatch_parts
        rows = self.expert_rows() // parts
        inner, row = rows * moe.ffn_hidden_size, BF16 * self.hidden * rows
        fp8, third = self.computes_fp8(layer), BF16 * self.expert_matrices() // 3 * (self.plan.lora is None)
        # FSDP takes the gradients of both products at the end, unless autograd accumulates them.
        adds = self.layout.ga > 1 and self.plan.recipe.training.grad_reduce_dtype != "fp32"
        earlier = third if self.is_sharded and not adds else 0
        if not fp8:
            # The gradient of the activation's input replaces that input.
            found = max(third + BF16 * inner + row, earlier + 2 * third + row - BF16 * inner)
        elif self.plan.fp8_recipe == "delayed":
            # One operator computes both products: the gradient of its output, also in two layouts, and of its input.
            found = 3 * third + (BF16 + 2 * self.products) * inner + 3 * row
        else:
            found = max(third + BF16 * inner + 2 * row, earlier + 2 * third + 3 * inner + row)
        if parts > 1:
            # Autograd adds the gradients of both halves at the end, when what one of them saved is free.
            found += max(0, 3 * third - self._saved_by_experts(moe, fp8, self.plan.lora is None) // parts)
        return found + self._recomputed_by_experts(layer, moe) + BF16 * self.hidden * self.shard

    def _recomputed_by_experts(self, layer: int, moe: MixtureOfExperts) -> int:
        """Return the bytes that experts recompute, less the bytes that are already freed."""
        if self.plan.recompute == "selective":
            size = 1 if self.computes_fp8(layer) else BF16
            again = size * self.expert_rows() * (self.hidden + moe.ffn_hidden_size)
            return again - BF16 * self.hidden * (self.expert_rows() + self._exchanged_rows)
        again = self.computed(layer) if self.plan.recompute == "full" else 0
        weighted = moe.router == "softmax-weighted-outputs"
        return again - BF16 * self.hidden * self.shard * moe.top_k * weighted

    def passing(self, layer: int) -> int:
        """Return the bytes that the forward pass of a block needs, including the bytes that it saves."""
        if self.model.moe and self.model.is_moe_layer(layer):
            return self.computed(layer)
        return max(self.computed(layer), BF16 * ((1 + self.products) * self._inner + 3 * self.hidden * self.tokens))

    @property
    def _inner(self) -> int:
        """The number of elements of a dense block's activation."""
        return self.tokens * self.part.ffn_hidden_size

    def keeps_gathered(self, layer: int) -> bool:
        """Return True if a compiled block saves gathered inputs of products, which torch copies if there are several
        sequences."""
        selective = self.plan.recompute == "selective" and not self.computes_fp8(layer)
        return selective and self.layout.mbs > 1 and self.layout.tp > 1

    @property
    def adds_in_products(self) -> bool:
        """Return whether products accumulate the gradients of matrices into buffers, which then stay in memory."""
        exact = self.plan.recipe.training.grad_reduce_dtype == "fp32"
        return not (self.fp8 or exact or self.is_sharded) and self.layout.ga > 1

    @property
    def is_shared(self) -> bool:
        """Return whether other ranks have the same parameters."""
        return self.layout.dp * self.layout.cp > 1 or (self.model.moe is not None and self.layout.edp > 1)

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP shards parameters."""
        return self.is_shared and self.plan.parallelism.dp_sharding == "full"

    def head(self) -> int:
        """Return the bytes at the end of the loss, such as logits and weight gradients, without what blocks save."""
        logits = self.tokens * self.vocabulary
        trained = BF16 * self.vocabulary * self.hidden if self.plan.lora is None else 0
        of_logits = BF16 * logits if self.plan.keep_logits else FP32 * logits // 16
        return 2 * BF16 * self.hidden * self.tokens + 2 * FP32 * self.hidden * self.shard + of_logits + trained


GATHERED = 3
"""Number of a rank's upcoming stages whose sharded parameters are gathered at a time
(torch/distributed/pipelining/schedules.py, _add_unshard_reshard)."""


class PeakMoment(NamedTuple):
    """The state of a pipeline rank just before or just after the end of a pass."""

    held: tuple[int, ...]
    """Number of micro-batches in each of its stages."""
    begun: tuple[bool, ...]
    """True for each stage that has gradients."""
    gathered: int
    """Number of stages with full parameters, if parameters are sharded."""
    passes: bool
    """True while a backward pass runs."""
    ends: bool
    """True if the pass is of the last stage."""
    adds: bool
    """True if gradients were just computed that will be accumulated or reduced."""

    def amounts(self) -> tuple[int, ...]:
        return (*self.held, *self.begun, self.gathered, self.passes, self.ends, self.adds)


def together_in_turn(layout: Layout) -> int:
    """Return the number of micro-batches that a virtual stage runs in a row."""
    return layout.ga // max(1, layout.ga // layout.pp)


def moments(layout: Layout, pp_rank: int, *, syncs: bool = False) -> tuple[PeakMoment, ...]:
    """Return the moments at which memory may peak, in torch's 1F1B or interleaved 1F1B (Narayanan et al., 2021)."""
    vp, micro_batches = layout.vp, layout.ga
    whole, together = micro_batches * vp, 1
    if vp == 1:
        ahead = min(whole, layout.pp - 1 - pp_rank)
    else:
        together = together_in_turn(layout)
        ahead = min(whole, (vp - 1) * together + 2 * (layout.pp - 1 - pp_rank))
    return _moments(vp, together, ahead, min(whole, ahead + 2 * together * vp), syncs=syncs)


@cache
def _moments(vp: int, together: int, ahead: int, count: int, *, syncs: bool) -> tuple[PeakMoment, ...]:
    """Return the moments if ``ahead`` of ``count`` forward passes precede the first backward pass."""
    forward = [done // together % vp for done in range(count)]
    passes = zip_longest(forward, [None] * ahead + [vp - 1 - stage for stage in forward])
    # Of moments that differ only in the stages with gradients, the last one has the most.
    last = {each._replace(begun=()): each for each in _after_passes(vp, passes, syncs=syncs)}
    return _largest(last.values())


def _after_passes(vp: int, passes: Iterable[tuple[int | None, int | None]], *, syncs: bool) -> Iterator[PeakMoment]:
    held, begun = [0] * vp, [False] * vp
    for (forward, backward), alike in groupby(passes):
        count = len(list(alike))
        for size in (1, 1, count - 2) if count > 2 else (1,) * count:
            if forward is not None:
                held[forward] += size
            if backward is not None:
                held[backward] -= size - 1
            coming = vp if forward is not None else sum(map(bool, held))
            ends = backward == vp - 1
            whole = min(coming, GATHERED)
            yield PeakMoment(tuple(held), tuple(begun), whole, passes=backward is not None, ends=ends, adds=False)
            if backward is None:
                continue
            held[backward] -= 1
            adds, begun[backward] = begun[backward] or syncs, True
            yield PeakMoment(tuple(held), tuple(begun), whole, passes=False, ends=False, adds=adds)


def _largest(candidates: Iterable[PeakMoment]) -> tuple[PeakMoment, ...]:
    largest: dict[tuple[int, ...], PeakMoment] = {}
    for one in sorted(candidates, key=lambda each: sum(each.amounts()), reverse=True):
        amounts = one.amounts()
        if not any(all(map(ge, other, amounts)) for other in largest):
            largest[amounts] = one
    return tuple(largest.values())

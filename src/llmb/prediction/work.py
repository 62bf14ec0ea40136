# SPDX-License-Identifier: Apache-2.0
"""The computation, memory traffic and messages of one rank in a training step, in closed form."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Literal, NamedTuple

from llmb.catalogue.layout_check import stage_layers, stage_sizes
from llmb.catalogue.records import Dtype
from llmb.catalogue.throughput import attention_square
from llmb.prediction.sizes import BF16, FP32, GATHERED, Product, Sizes, block_products, head_product, together_in_turn
from llmb.runs.plan import EnginePlan

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Output tile of an SM: CUTLASS's default on Hopper for bf16 and FP8."""

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass relative to the forward pass: five products instead of two."""

TrainingPass = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["tp", "cp", "ep", "etp", "pp", "dp", "edp", "dp_replicas", "edp_replicas"]


class Messages(NamedTuple):
    """``number`` messages of one kind in one group."""

    kind: str
    group: Group
    number: int
    size: float
    """Bytes of one message, before a reduction or after a gather."""
    beside: bool = False
    """True if they are hidden behind products at no cost."""
    copies: int = 0
    """Copies per token if a node's copies are joined; else 0."""


@dataclass(frozen=True, slots=True)
class PassWork:
    """A rank's work for one micro-batch in the forward or the backward pass of a part of the model."""

    flops: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of products by precision, including the empty parts of tiles and waves."""
    experts: float = 0.0
    """FLOPs of routed experts, which ``flops`` include."""
    attention: float = 0.0
    """FLOPs of attention."""
    written: float = 0.0
    """Bytes of the products' outputs and of the buffers of weight gradients."""
    moved: float = 0.0
    """Bytes that operators between products read and write."""
    routed: float = 0.0
    """Bytes that the permutation of tokens to experts reads and writes."""
    cast: float = 0.0
    """Bytes that casts read and write."""
    cast_layers: float = 0.0
    """Number of layers that launch kernels for casts, half in each pass."""
    expert_layers: float = 0.0
    """Number of layers that launch kernels for experts, half in each pass."""
    messages: tuple[Messages, ...] = ()


EXTRA_PASSES = 4
"""Number of operators on the first product's output if experts have biases: bias, two limits and shifted gate."""
Work = tuple[PassWork, ...]
"""The forward and the backward pass of a micro-batch; for the head, also weight gradients that hide no messages."""


class ProductShape(NamedTuple):
    """The shape of a product: [rows, inner] times [inner, columns]."""

    precision: str
    training_pass: TrainingPass
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """Measurements of a machine that refine its rates."""

    products: Mapping[ProductShape, float] = field(default_factory=dict)
    """Factor by which a product in full tiles and waves takes longer than at the rate of its precision."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of collectives within an NVLink domain, by the kinds of ``Messages``."""
    exchanges: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """Seconds of an all-to-all, by the number of ranks, the number of NVLink domains and the bytes."""


class LayerKind(NamedTuple):
    """Layers with the same work."""

    experts: bool
    """True if they have routed experts."""
    pairs: float
    """Number of position pairs that causal attention compares in a sequence."""
    casts: bool
    """True if they compute in FP8."""


def filled(sms: int | None, rows: int, columns: int, together: int = 1) -> float:
    """Return the slowdown by partial tiles and waves (NVIDIA, Matrix Multiplication Background User's Guide); 1 if
    ``sms`` is None."""
    if sms is None or not rows or not columns:
        return 1.0
    tiles = ceil(rows / TILE_ROWS) * ceil(columns / TILE_COLUMNS) * together
    waves = ceil(tiles / sms)
    return waves * sms * TILE_ROWS * TILE_COLUMNS / (rows * columns * together)


class RankWork:
    """The work of the ranks of a plan: per layer, outside of layers, and per step."""

    def __init__(
        self,
        plan: EnginePlan,
        sms: int | None,
        machine: MeasuredMachine | None = None,
        *,
        joins_copies: bool = False,
        gathers_casts: bool = True,
    ) -> None:
        self.plan, self.sms, self.measured = plan, sms, (machine or MeasuredMachine()).products
        self.copies = plan.recipe.model.moe.top_k if plan.recipe.model.moe and joins_copies else 0
        self.gathers_casts = gathers_casts and plan.compute_path.gathers_fp8_gradients
        self.fuses = gathers_casts and plan.compute_path.fuses_tp
        self.parts = plan.compute_path.dispatch_parts if gathers_casts else 1
        self.model, self.layout = plan.recipe.model, plan.recipe.layout
        self.sizes = Sizes(plan)
        self.trained = plan.lora is None
        self.again = plan.recompute == "full"

    @cached_property
    def examples(self) -> dict[LayerKind, int]:
        """The first layer of each kind."""
        layers = range(self.layout.layers if self._layers_differ else 1)
        return {self.kind(layer): layer for layer in reversed(layers)}

    @property
    def _layers_differ(self) -> bool:
        model = self.model
        return bool(model.moe or model.chunked_attention or model.other_parts or self.plan.fp8_recipe == "current")

    @cached_property
    def stages(self) -> list[tuple[tuple[LayerKind, int], ...]]:
        """The number of layers of each kind on each rank of the pipeline."""
        pp = self.layout.pp
        if not self._layers_differ:
            (kind,), sizes = self.examples, stage_sizes(self.layout)
            return [((kind, sum(sizes[rank::pp])),) for rank in range(pp)]
        stages = stage_layers(self.layout)
        kinds = [self.kind(layer) for layer in range(self.layout.layers)]
        counted = [Counter(kinds[layer] for stage in stages[rank::pp] for layer in stage) for rank in range(pp)]
        counted[-1][kinds[-1]] += self.model.multi_token_layers
        return [tuple(each.items()) for each in counted]

    def kind(self, layer: int) -> LayerKind:
        recipe = self.plan.recipe
        attends_all = self.model.is_global_layer(layer)
        pairs = attention_square(self.model, attends_all, self.layout.seq_len, recipe.packing) / 2
        return LayerKind(self.model.is_moe_layer(layer), pairs, self.sizes.computes_fp8(layer))

    def precision(self, kind: LayerKind) -> str:
        return self.plan.recipe.dtype.value if kind.casts else Dtype.BF16.value

    def layer(self, kind: LayerKind) -> Work:
        """Return the work of a micro-batch in one layer; the backward pass includes what it recomputes."""
        precision = self.precision(kind)
        products = [(self._passes(each, precision), each.name.startswith("expert_")) for each in self._shapes(kind)]
        ahead = sum(each[0] for each, _ in products)
        back = sum(sum(each[1:]) for each, _ in products)
        experts_ahead = sum(each[0] for each, of_experts in products if of_experts)
        experts_back = sum(sum(each[1:]) for each, of_experts in products if of_experts)
        attention = self._attention(kind)
        moved_ahead, moved_back = self._moved(kind)
        written_ahead, written_back = self._written(kind)
        messages_ahead, messages_back = self._messages(kind)
        routed, cast = self._routed(kind), self._cast(kind) / 2
        again = int(self.again)
        forward = PassWork(
            {precision: ahead}, experts_ahead, attention, written_ahead, moved_ahead, routed, cast,
            kind.casts / 2, self.parts * kind.experts / 2, messages_ahead,
        )  # fmt: skip
        backward = PassWork(
            {precision: back + again * ahead},
            experts_back + again * experts_ahead,
            attention * (BACKWARD_ATTENTION + again),
            written_back + again * written_ahead,
            moved_back + again * moved_ahead,
            routed * (1 + again),
            cast,
            kind.casts / 2,
            self.parts * kind.experts / 2,
            (*messages_ahead, *messages_back) if self.again else messages_back,
        )
        return forward, backward

    def _shapes(self, kind: LayerKind) -> Iterator[Product]:
        factor = self.plan.capacity_factor
        for each in block_products(self.model, self.layout, experts=kind.experts, capacity_factor=factor):
            parts = self.parts if each.name.startswith("expert_") else 1
            yield from [each._replace(rows=ceil(each.rows / parts))] * parts

    def _passes(self, product: Product, precision: str) -> tuple[float, ...]:
        """Return a product's FLOPs by pass, scaled by ``_filled`` and measurements; weight gradients if trained."""
        _, rows, inner, columns, together = product
        found = [
            ProductShape(precision, "forward", rows, inner, columns),
            ProductShape(precision, "input_gradient", rows, columns, inner),
        ]
        if self.trained:
            found.append(ProductShape(precision, "weight_gradient", columns, rows, inner))
        flops = 2.0 * rows * inner * columns * together
        filling = partial(self._filled, product.name, together)
        return tuple(flops * filling(each) * self.measured.get(each, 1.0) for each in found)

    def _filled(self, name: str, together: int, shape: ProductShape) -> float:
        """Return ``filled`` of a product. Fused operators multiply the rows of two ranks at a time, on two streams."""
        passes = ("forward", "input_gradient") if name.endswith(("output", "down")) else ("forward",)
        alone = name.startswith(("expert_", "logits", "multi_token"))
        parts = self.layout.tp if self.fuses and not alone and shape.training_pass in passes else 1
        return filled(self.sms, shape.rows // parts, shape.columns, together * min(parts, 2))

    def _written(self, kind: LayerKind) -> tuple[float, float]:
        ahead, back = 0, 0
        for _, rows, inner, columns, together in self._shapes(kind):
            of_weights = 2 * inner * columns if self.trained else 0  # buffers are read and written
            ahead += together * rows * columns
            back += together * (rows * inner + of_weights)
        return float(BF16 * ahead), float(BF16 * back)

    def _attention(self, kind: LayerKind) -> float:
        """Return the FLOPs of attention in the forward pass: scores and sums of values, without masked pairs."""
        layout = self.layout
        return 2.0 * (self.sizes.query + self.sizes.attended) * kind.pairs * layout.mbs / layout.cp

    def _moved(self, kind: LayerKind) -> tuple[float, float]:
        sizes, gated = self.sizes, self.sizes.products
        between = sizes.hidden * sizes.between
        norms, sums, rotary = 2 * 2, 2 * 3, 2
        heads = rotary * (sizes.query + sizes.key) * sizes.tokens
        ahead: float = BF16 * ((norms + sums) * between + heads + 4 * sizes.latents * sizes.tokens)
        back: float = BF16 * ((2 * 3 + 2 * 2) * between + heads + 6 * sizes.latents * sizes.tokens)
        inner = self._activated(kind)
        activation = BF16 * (gated + 1) * inner
        ahead += activation
        back += BF16 * (2 * gated + 1) * inner
        if self.plan.lora is not None:
            # Three passes of adapters over inputs and outputs, which have the width of a layer's own.
            back += 3 * BF16 * sizes.tokens * (sizes.hidden + sizes.query + 2 * sizes.key)
        return ahead, back + activation * (self.plan.recompute == "selective")

    def _activated(self, kind: LayerKind) -> int:
        """Count the elements between the two products of a feed-forward layer."""
        sizes, moe = self.sizes, self.sizes.part.moe
        if not kind.experts or moe is None:
            return sizes.tokens * sizes.part.ffn_hidden_size
        return sizes.tokens * (moe.shared_ffn_hidden_size or 0) + sizes.expert_rows() * moe.ffn_hidden_size

    def _routed(self, kind: LayerKind) -> float:
        """Return the bytes that one pass moves to sort tokens by expert, restore their order and add biases."""
        if not kind.experts or self.sizes.part.moe is None:
            return 0.0
        parts, rows = self.model.other_parts, self.sizes.expert_rows()
        features = self.sizes.products * self.sizes.part.moe.ffn_hidden_size
        extra = EXTRA_PASSES * features if parts and parts.expert_biases else 0
        return 2.0 * BF16 * rows * (2 * self.sizes.hidden + extra)

    def _cast(self, kind: LayerKind) -> float:
        if not kind.casts:
            return 0.0
        sizes = self.sizes
        inner = self._activated(kind)
        ends = 2 * sizes.hidden * sizes.shard
        inputs = ends + sizes.attended * sizes.tokens + inner
        gradients = ends + (sizes.query + sizes.key + sizes.value) * sizes.tokens + sizes.products * inner
        gathered = 2 * 4 * sizes.hidden * sizes.tokens if self.layout.tp > 1 else 0
        return 4.0 * (inputs + gradients) + gathered

    def _messages(self, kind: LayerKind) -> tuple[tuple[Messages, ...], tuple[Messages, ...]]:
        sizes, layout = self.sizes, self.layout
        ahead, back = [], []
        whole = float(BF16 * sizes.hidden * sizes.tokens)
        if layout.sequence_shards > 1:
            pairs = 2 if not kind.experts or self._has_shared else 1
            cast = whole / 2 if kind.casts else whole
            gradient = cast if self.gathers_casts else whole
            ahead += self._exposed("all_gather", pairs, cast) + self._exposed("reduce_scatter", pairs, whole)
            back += self._exposed("all_gather", pairs, gradient)
            back.append(Messages("reduce_scatter", "tp", pairs, whole, beside=self.fuses))
            if self.trained:
                back.append(Messages("all_gather", "tp", pairs, cast, beside=True))
        elif layout.tp > 1:
            ahead.append(Messages("all_reduce", "tp", 2, whole))
            back.append(Messages("all_reduce", "tp", 2, whole))
        if layout.cp > 1:
            keys = float(BF16 * (sizes.key + sizes.value) * sizes.tokens * layout.cp)
            ahead.append(Messages("all_gather", "cp", 1, keys))
            back.append(Messages("reduce_scatter", "cp", 1, keys))
        if kind.experts:
            ahead += self._expert_messages()
            back += self._expert_messages()
        return tuple(ahead), tuple(back)

    def _exposed(self, kind: str, number: int, size: float) -> list[Messages]:
        """Return the messages before or after a product. Fused operators send all but one rank's part beside it."""
        exposed = size / self.layout.tp if self.fuses else size
        beside = [Messages(kind, "tp", number, size - exposed, beside=True)] if self.fuses else []
        return [Messages(kind, "tp", number, exposed), *beside]

    @property
    def _has_shared(self) -> bool:
        return self.model.moe is not None and self.model.moe.shared_ffn_hidden_size is not None

    def _expert_messages(self) -> Iterator[Messages]:
        sizes, layout = self.sizes, self.layout
        rows = BF16 * sizes.hidden * sizes.expert_rows()
        if layout.ep > 1:
            # One half's rows arrive, and the other's outputs return, while experts process the other half.
            for beside in (False, True)[: self.parts]:
                size = rows / layout.etp / self.parts
                yield Messages("all_to_all", "ep", 2, size, beside=beside, copies=self.copies)
        if layout.etp > 1:
            yield Messages("all_to_all", "etp", 2 * self.parts, rows / self.parts)

    def first(self) -> Work:
        """Return the work of the embedding."""
        moved = float(2 * BF16 * self.sizes.hidden * self.sizes.tokens)
        scatter, gather = self._end_messages()
        return PassWork(moved=moved, messages=scatter), PassWork(moved=moved, messages=gather if self.trained else ())

    def last(self) -> Work:
        """Return the work of the head and the loss, including layers that predict further tokens."""
        sizes = self.sizes
        further = self.model.multi_token_layers
        heads = 1 + further
        joined = self._passes(Product("multi_token", sizes.shard, 2 * sizes.hidden, sizes.hidden), "bf16")
        pairs = zip(self._of_head, joined, strict=True)
        ahead, back, *weights = (heads * head + further * join for head, join in pairs)
        moved = float((2 * BF16 + 3 * FP32) * sizes.tokens * sizes.vocabulary)
        scatter, gather = self._end_messages()
        forward = PassWork({"bf16": ahead}, moved=heads * moved / 2, messages=heads * gather)
        backward = PassWork({"bf16": back}, moved=heads * moved / 2, messages=heads * scatter)
        # Nothing is hidden behind gradients of weights, which a pipeline defers.
        return forward, backward, PassWork({"bf16": sum(weights)})

    def _end_messages(self) -> tuple[tuple[Messages, ...], tuple[Messages, ...]]:
        """Return the tensor-parallel messages of the forward pass after the embedding, and before the head."""
        whole = float(BF16 * self.sizes.hidden * self.sizes.tokens)
        if self.layout.sequence_shards > 1:
            return (Messages("reduce_scatter", "tp", 1, whole),), (Messages("all_gather", "tp", 1, whole),)
        if self.layout.tp > 1:
            return (Messages("all_reduce", "tp", 1, whole),), ()
        return (), ()

    def head_weight_gradient(self) -> float:
        """Return the FLOPs of the head's weight gradient in a micro-batch, which may wait for the pipeline's bubble."""
        return sum(self._of_head[2:])

    @cached_property
    def _of_head(self) -> tuple[float, ...]:
        return self._passes(head_product(self.model, self.layout), "bf16")

    def between_stages(self) -> Messages:
        """Return the messages of a micro-batch between the stages of a rank and their neighbors, in both passes."""
        return Messages("send", "pp", 2 * self.layout.vp, float(BF16 * self.sizes.hidden * self.sizes.between))

    def parameters(self, rank: int) -> tuple[int, int]:
        """Return the numbers of dense and of routed experts' parameters that a pipeline rank trains."""
        if self.plan.lora is None:
            return self._weights(rank)
        return sum(count for _, count in self.stages[rank]) * self.sizes.adapters(), 0

    def _weights(self, rank: int) -> tuple[int, int]:
        sizes, kinds = self.sizes, self.stages[rank]
        tables = sizes.vocabulary * sizes.hidden
        is_last = rank == self.layout.pp - 1
        ends = (rank == 0) + (is_last and not (rank == 0 and self.model.tied_embeddings))
        dense = ends * tables + is_last * (sizes.norm + sizes.multi_token(self.layout.pp))
        for kind, count in kinds:
            layer = self.examples[kind]
            dense += count * (sizes.matrices(layer) + sizes.others(layer))
        return dense, sum(count for kind, count in kinds if kind.experts) * sizes.expert_matrices()

    def of_step(self, rank: int) -> Iterator[Messages]:
        """Yield the messages with which a pipeline rank reduces gradients and gathers parameters in a step."""
        layout, lora = self.layout, self.plan.lora is not None
        size_of_gradient = FP32 if self.plan.recipe.training.grad_reduce_dtype == "fp32" else BF16
        replicas = self.plan.parallelism.replicas(layout)
        groups: tuple[tuple[Group, Group, int, int], ...] = (
            ("dp", "dp_replicas", layout.dp * layout.cp, replicas.dense),
            ("edp", "edp_replicas", layout.edp, replicas.experts),
        )
        # Frozen weights are gathered, too, if ranks share them within a step.
        frozen = self._weights(rank) if lora and self.plan.parallelism.dp_sharding == "full" else (0, 0)
        for (shards, copies, ranks, number), trained, kept in zip(groups, self.parameters(rank), frozen, strict=True):
            gradients = float(size_of_gradient * trained)
            if ranks == 1 or not trained + kept:
                continue
            if ranks > number:
                yield Messages("reduce_scatter", shards, layout.ga if self.plan.syncs_each_pass else 1, gradients)
                yield Messages("all_gather", shards, self.gathers, float(BF16 * (trained + kept)))
            if number > 1:
                yield Messages("all_reduce", copies, 1, gradients * number / ranks)
        last = layout.pp - 1
        if self.model.tied_embeddings and self.trained and last and rank in (0, last):
            # Both stages have the table, and one sends its gradient to the other.
            size = FP32 * replicas.dense / (layout.dp * layout.cp) if self.sizes.is_sharded else size_of_gradient
            yield Messages("send", "pp", 1, size * self.sizes.vocabulary * self.sizes.hidden)

    @property
    def gathers(self) -> int:
        """The number of times that parameters are gathered in a step."""
        layout = self.layout
        if self.plan.parallelism.dp_sharding != "full" or (layout.pp > 1 and layout.vp <= GATHERED):
            return 1
        return 2 * layout.ga // (together_in_turn(layout) if layout.pp > 1 else 1)

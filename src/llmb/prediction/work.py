# SPDX-License-Identifier: Apache-2.0
"""The computation, memory traffic and messages of one rank in a training step, in closed form. Pure.

Amounts follow from the sizes of the model's parts on a rank; messages are those that the engine's own account of a rank
counts. Their times are in ``step_time.py``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

from llmb.catalogue.layout_check import stage_layers, stage_sizes
from llmb.catalogue.throughput import attention_square
from llmb.prediction.sizes import BF16, FP32, Product, Sizes, block_products, head_product
from llmb.runs.plan import EnginePlan

TILE_ROWS, TILE_COLUMNS = 128, 256
"""The part of a product's output that an SM computes at a time: CUTLASS's default on Hopper for bf16 and FP8."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass relative to the forward pass: five products instead of two."""

TrainingPass = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["tp", "cp", "ep", "etp", "pp", "dp", "edp"]


class Messages(NamedTuple):
    """Messages of one kind in one group; ``size`` is the full size of one message on a rank, in bytes.

    beside: fully hidden behind products.
    """

    kind: str
    group: Group
    number: int
    size: float
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Amounts:
    """The work of a rank for one micro-batch in some of its layers, forward and backward.

    flops: of products, by precision or ``attention``, with the empty parts of tiles and waves. written: bytes of the
    products' outputs, and of the buffers of weight gradients. moved, cast: bytes that operators between products, and
    casts to FP8, read and write. fp8_layers: the number of layers in FP8.
    """

    flops: Mapping[str, float]
    written: float = 0.0
    moved: float = 0.0
    cast: float = 0.0
    fp8_layers: int = 0
    messages: tuple[Messages, ...] = ()


class ProductShape(NamedTuple):
    """The shape of a product: [rows, inner] times [inner, columns]."""

    precision: str
    training_pass: TrainingPass
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """Measurements of a machine by kind, beside the rates of all work.

    products: the factor by which a product, in full tiles and waves, takes longer than at the rate of its precision.
    links: bytes per second of collectives within an NVLink domain, by the kinds of ``Messages``.
    """

    products: Mapping[ProductShape, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)


class LayerKind(NamedTuple):
    """Layers with the same work."""

    experts: bool
    attends_all: bool
    fp8: bool


def filled(sms: int | None, rows: int, columns: int, together: int = 1) -> float:
    """Return the factor by which a product takes longer than with full tiles and waves (NVIDIA, Matrix Multiplication
    Background User's Guide, tile and wave quantization)."""
    if sms is None or not rows or not columns:
        return 1.0
    tiles = ceil(rows / TILE_ROWS) * ceil(columns / TILE_COLUMNS) * together
    waves = ceil(tiles / sms)
    return waves * sms * TILE_ROWS * TILE_COLUMNS / (rows * columns * together)


class RankWork:
    """The work of the ranks of a plan: per layer, outside of layers, and per step."""

    def __init__(self, plan: EnginePlan, sms: int | None, machine: MeasuredMachine | None = None) -> None:
        self.plan, self.sms, self.measured = plan, sms, (machine or MeasuredMachine()).products
        self.model, self.layout = plan.recipe.model, plan.recipe.layout
        self.sizes = Sizes(plan)
        self.trained = plan.lora is None

    @cached_property
    def examples(self) -> dict[LayerKind, int]:
        """The first layer of each kind."""
        return {self.kind(layer): layer for layer in range(self.layout.layers if self._layers_differ else 1)}

    @property
    def _layers_differ(self) -> bool:
        model = self.model
        windows = model.other_parts and model.other_parts.sliding_window
        return bool(model.moe or model.chunked_attention or windows or self.plan.fp8_recipe == "current")

    @cached_property
    def stages(self) -> list[tuple[tuple[LayerKind, int], ...]]:
        """The number of layers of each kind on each rank of the pipeline."""
        pp = self.layout.pp
        if not self._layers_differ:
            (kind,), sizes = self.examples, stage_sizes(self.layout)
            return [((kind, sum(sizes[rank::pp])),) for rank in range(pp)]
        layers = stage_layers(self.layout)
        kinds = [self.kind(layer) for layer in range(self.layout.layers)]
        counted = [Counter(kinds[layer] for stage in layers[rank::pp] for layer in stage) for rank in range(pp)]
        counted[-1][kinds[-1]] += self.model.multi_token_layers
        return [tuple(each.items()) for each in counted]

    def kind(self, layer: int) -> LayerKind:
        model = self.model
        return LayerKind(model.is_moe_layer(layer), model.is_global_layer(layer), self.sizes.computes_fp8(layer))

    def layer(self, kind: LayerKind) -> Amounts:
        """Return the work of a micro-batch in one layer, with recomputation for its backward pass."""
        precision = "fp8" if kind.fp8 else "bf16"
        forward, backward = self._products(kind)
        again = self.plan.recompute == "full"
        attention = self._attention(kind)
        return Amounts(
            flops={
                precision: forward * (2 if again else 1) + backward,
                "attention": attention * (BACKWARD_ATTENTION + (2 if again else 1)),
            },
            written=self._written(kind, again=again),
            moved=self._moved(kind, again=again),
            cast=self._cast(kind) if kind.fp8 else 0.0,
            fp8_layers=int(kind.fp8),
            messages=tuple(self._messages(kind, again=again)),
        )

    def _shapes(self, kind: LayerKind) -> Iterator[Product]:
        factor = self.plan.capacity_factor
        return block_products(self.model, self.layout, experts=kind.experts, capacity_factor=factor)

    def _products(self, kind: LayerKind) -> tuple[float, float]:
        """Return the FLOPs of the products of a layer, forward and backward."""
        precision = "fp8" if kind.fp8 else "bf16"
        passes = [self._passes(each, precision) for each in self._shapes(kind)]
        return sum(each[0] for each in passes), sum(sum(each[1:]) for each in passes)

    def _passes(self, product: Product, precision: str) -> tuple[float, ...]:
        """Return the FLOPs of each pass of a product; weight gradients only if weights are trained."""
        _, rows, inner, columns, together = product
        found = [
            ProductShape(precision, "forward", rows, inner, columns),
            ProductShape(precision, "input_gradient", rows, columns, inner),
        ]
        if self.trained:
            found.append(ProductShape(precision, "weight_gradient", columns, rows, inner))
        flops = 2.0 * rows * inner * columns * together
        return tuple(
            flops * filled(self.sms, each.rows, each.columns, together) * self.measured.get(each, 1.0) for each in found
        )

    def _written(self, kind: LayerKind, *, again: bool) -> float:
        elements = 0
        for _, rows, inner, columns, together in self._shapes(kind):
            of_weights = 2 * inner * columns if self.trained else 0  # buffers are read and written
            elements += together * (rows * columns * (2 if again else 1) + rows * inner + of_weights)
        return float(BF16 * elements)

    def _attention(self, kind: LayerKind) -> float:
        """Return the FLOPs of the forward pass: scores and sums of values, of the causal half."""
        recipe, layout = self.plan.recipe, self.layout
        pairs = attention_square(self.model, kind.attends_all, layout.seq_len, recipe.packing) / 2
        return 2.0 * (self.sizes.query + self.sizes.attended) * pairs * layout.mbs / layout.cp

    def _moved(self, kind: LayerKind, *, again: bool) -> float:
        """Return the bytes of norms, residual sums, rotary embeddings and activations; their backward passes read the
        same inputs and a gradient."""
        sizes, gated = self.sizes, self.sizes.products
        between = sizes.hidden * sizes.shard
        norms, sums, rotary = 2 * 2, 2 * 3, 2
        forward: float = BF16 * ((norms + sums) * between + rotary * (sizes.query + sizes.key) * sizes.tokens)
        backward: float = BF16 * ((2 * 3 + 2 * 2) * between + rotary * (sizes.query + sizes.key) * sizes.tokens)
        inner = self._activated(kind)
        activation = BF16 * (gated + 1) * inner
        forward += activation + self._routed(kind)
        backward += BF16 * (2 * gated + 1) * inner + self._routed(kind)
        if self.plan.lora is not None:
            # Three passes of adapters over inputs and outputs, which have the width of a layer's own.
            backward += 3 * BF16 * sizes.tokens * (sizes.hidden + sizes.query + 2 * sizes.key)
        if self.plan.recompute == "selective":
            return forward + backward + activation
        return forward * (2 if again else 1) + backward

    def _activated(self, kind: LayerKind) -> int:
        """Count the elements of the activations of a layer."""
        sizes, moe = self.sizes, self.sizes.part.moe
        if not kind.experts or moe is None:
            return sizes.tokens * sizes.part.ffn_hidden_size
        return sizes.tokens * (moe.shared_ffn_hidden_size or 0) + sizes.expert_rows() * moe.ffn_hidden_size

    def _routed(self, kind: LayerKind) -> float:
        """Return the bytes of sorting tokens once on the way to experts and once on the way back."""
        return 2 * 2 * BF16 * self.sizes.hidden * self.sizes.expert_rows() if kind.experts else 0.0

    def _cast(self, kind: LayerKind) -> float:
        """Return the bytes of casts: for each element that a product reads, forward and backward, 2 are read and 2
        written, one per layout; inputs that tensor parallelism gathers in FP8 are transposed afterwards."""
        sizes = self.sizes
        inner = self._activated(kind)
        ends = 2 * sizes.hidden * sizes.shard
        inputs = ends + sizes.attended * sizes.tokens + inner
        gradients = ends + (sizes.query + sizes.key + sizes.value) * sizes.tokens + sizes.products * inner
        gathered = 2 * 4 * sizes.hidden * sizes.tokens if self.layout.tp > 1 else 0
        return 4.0 * (inputs + gradients) + gathered

    def _messages(self, kind: LayerKind, *, again: bool) -> Iterator[Messages]:
        sizes, layout = self.sizes, self.layout
        whole = float(BF16 * sizes.hidden * sizes.tokens)
        passes = 2 if again else 1
        if layout.sequence_shards > 1:
            pairs = 2 if not kind.experts or self._has_shared else 1
            cast = whole / 2 if kind.fp8 else whole
            yield Messages("all_gather", "tp", pairs * passes, cast)
            yield Messages("all_gather", "tp", pairs, whole)
            yield Messages("reduce_scatter", "tp", pairs * (passes + 1), whole)
            if self.trained and not again:
                yield Messages("all_gather", "tp", pairs, cast, beside=True)
        elif layout.tp > 1:
            yield Messages("all_reduce", "tp", 2 * (passes + 1), whole)
        if layout.cp > 1:
            keys = float(BF16 * (sizes.key + sizes.value) * sizes.tokens * layout.cp)
            yield Messages("all_gather", "cp", passes, keys)
            yield Messages("reduce_scatter", "cp", 1, keys)
        if kind.experts:
            yield from self._expert_messages(passes)

    @property
    def _has_shared(self) -> bool:
        return self.model.moe is not None and self.model.moe.shared_ffn_hidden_size is not None

    def _expert_messages(self, passes: int) -> Iterator[Messages]:
        """Yield the messages that carry tokens to experts and back, forward and backward."""
        sizes, layout = self.sizes, self.layout
        rows = BF16 * sizes.hidden * sizes.expert_rows()
        if layout.ep > 1:
            yield Messages("all_to_all", "ep", 2 * (passes + 1), rows / layout.etp)
        if layout.etp > 1:
            yield Messages("all_to_all", "etp", 2 * (passes + 1), float(rows))

    def first(self) -> Amounts:
        """Return the work of the embedding."""
        sizes = self.sizes
        messages = self._end_messages() if self.layout.sequence_shards > 1 else ()
        return Amounts({}, moved=float(4 * BF16 * sizes.hidden * sizes.tokens), messages=messages)

    def last(self) -> Amounts:
        """Return the work of the head and the loss: products and logits in bf16, and fp32 logits in the loss."""
        sizes, further = self.sizes, self.model.multi_token_layers
        messages = self._end_messages() if self.layout.sequence_shards > 1 else ()
        joined = Product("multi_token", sizes.shard, 2 * sizes.hidden, sizes.hidden)
        return Amounts(
            {"bf16": sum(self._of_head) * (1 + further) + further * sum(self._passes(joined, "bf16"))},
            moved=float((2 * BF16 + 3 * FP32) * sizes.tokens * sizes.vocabulary * (1 + further)),
            messages=messages,
        )

    def _end_messages(self) -> tuple[Messages, ...]:
        whole = float(BF16 * self.sizes.hidden * self.sizes.tokens)
        return Messages("all_gather", "tp", 1, whole), Messages("reduce_scatter", "tp", 1, whole)

    def head_weight_gradient(self) -> float:
        """Return the FLOPs of a micro-batch that can be deferred to the end of the pipeline's last stage."""
        return sum(self._of_head[2:])

    @property
    def _of_head(self) -> tuple[float, ...]:
        return self._passes(head_product(self.model, self.layout), "bf16")

    def between_stages(self) -> Messages:
        """Return the messages of a micro-batch at the ends of a rank's stages, forward and backward."""
        return Messages("send", "pp", 2 * self.layout.vp, float(BF16 * self.sizes.hidden * self.sizes.shard))

    def parameters(self, rank: int) -> tuple[int, int]:
        """Count the elements that a rank of the pipeline trains: dense, and of routed experts."""
        sizes, kinds = self.sizes, self.stages[rank]
        if self.plan.lora is not None:
            return sum(count for _, count in kinds) * sizes.adapters(), 0
        tables = sizes.vocabulary * sizes.hidden
        ends = (rank == 0) + (rank == self.layout.pp - 1 and not (rank == 0 and self.model.tied_embeddings))
        dense = ends * tables + (rank == self.layout.pp - 1) * (sizes.norm + sizes.multi_token(self.layout.pp))
        for kind, count in kinds:
            layer = self.examples[kind]
            dense += count * (sizes.matrices(layer) + sizes.others(layer))
        return dense, sum(count for kind, count in kinds if kind.experts) * sizes.expert_matrices()

    def of_step(self, parameters: tuple[int, int]) -> Iterator[Messages]:
        """Yield the messages of gradients and parameters, once a step; with ZeRO-3 parameters once a micro-batch."""
        layout, sharding = self.layout, self.plan.parallelism.dp_sharding
        exact = self.plan.recipe.training.grad_reduce_dtype == "fp32"
        groups: tuple[tuple[Group, int], ...] = (("dp", layout.dp * layout.cp), ("edp", layout.edp))
        for (group, ranks), elements in zip(groups, parameters, strict=True):
            if ranks == 1 or not elements:
                continue
            gradients = float((FP32 if exact else BF16) * elements)
            if sharding == "none":
                yield Messages("all_reduce", group, 1, gradients)
                continue
            yield Messages("reduce_scatter", group, 1, gradients)
            yield Messages("all_gather", group, layout.ga if sharding == "full" else 1, float(BF16 * elements))

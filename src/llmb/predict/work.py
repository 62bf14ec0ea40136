# SPDX-License-Identifier: Apache-2.0
"""What one rank of a layout computes, moves and exchanges in a training step, in closed form. Pure.

Amounts follow from the sizes of the model's parts on a rank; messages are those that the engine's own account of a rank
counts. How long they take is in ``step.py``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

from llmb.catalogue.layout_check import stage_layers, stage_sizes
from llmb.catalogue.throughput import attention_square
from llmb.predict.sizes import BF16, FP32, Product, Sizes, block_products, head_product
from llmb.runs.plan import EnginePlan

TILE_ROWS, TILE_COLUMNS = 128, 256
"""One SM computes that much of a product's output at a time: CUTLASS's default on Hopper for bf16 and FP8."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass in those of the forward pass: five products in place of two."""

TrainingPass = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["tp", "cp", "ep", "etp", "pp", "dp", "edp"]


class Messages(NamedTuple):
    """Messages of one kind in one group; ``size`` is the whole of one message in bytes, as it is on a rank.

    beside: products run meanwhile, and wait for none of it.
    """

    kind: str
    group: Group
    number: int
    size: float
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a rank does for one micro-batch in some of its layers, forward and backward.

    flops: of products by precision, with the parts of tiles and waves that stay empty; ``attention`` of its products.
    written: bytes of the products' outputs, and of the sums that weight gradients are added to. moved, cast: what
    operators between products, and casts to FP8, read and write. fp8_layers: layers in FP8.
    """

    flops: Mapping[str, float]
    written: float = 0.0
    moved: float = 0.0
    cast: float = 0.0
    fp8_layers: int = 0
    messages: tuple[Messages, ...] = ()


class ProductShape(NamedTuple):
    """A product as it is computed: [rows, inner] times [inner, columns]."""

    precision: str
    training_pass: TrainingPass
    rows: int
    inner: int
    columns: int


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """What was measured of a machine by kind, beside rates of all work.

    products: how many times longer than by the rate of its precision a product takes, in full tiles and waves. links:
    bytes per second that collectives reach within an NVLink domain, by the kinds of ``Messages``.
    """

    products: Mapping[ProductShape, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)


class LayerKind(NamedTuple):
    """Layers that do the same."""

    experts: bool
    attends_all: bool
    fp8: bool


def filled(sms: int | None, rows: int, columns: int, together: int = 1) -> float:
    """How much longer than full tiles and waves a product takes (NVIDIA, Matrix Multiplication Background User's Guide,
    tile and wave quantization)."""
    if sms is None or not rows or not columns:
        return 1.0
    tiles = ceil(rows / TILE_ROWS) * ceil(columns / TILE_COLUMNS) * together
    waves = ceil(tiles / sms)
    return waves * sms * TILE_ROWS * TILE_COLUMNS / (rows * columns * together)


class RankWork:
    """The work of the ranks of a plan: of a layer, of what is in no layer, and of a step."""

    def __init__(self, plan: EnginePlan, sms: int | None, machine: MeasuredMachine | None = None) -> None:
        self.plan, self.sms, self.measured = plan, sms, (machine or MeasuredMachine()).products
        self.model, self.layout = plan.recipe.model, plan.recipe.layout
        self.sizes = Sizes(plan)
        self.trained = plan.lora is None

    @cached_property
    def examples(self) -> dict[LayerKind, int]:
        """One layer of each kind."""
        return {self.kind(layer): layer for layer in range(self.layout.layers if self._layers_differ else 1)}

    @property
    def _layers_differ(self) -> bool:
        model = self.model
        return bool(model.moe or model.chunked_attention or self.plan.fp8_recipe == "current")

    @cached_property
    def stages(self) -> list[tuple[tuple[LayerKind, int], ...]]:
        """The number of layers of each kind on each rank of the pipeline."""
        pp = self.layout.pp
        if not self._layers_differ:
            (kind,), sizes = self.examples, stage_sizes(self.layout)
            return [((kind, sum(sizes[rank::pp])),) for rank in range(pp)]
        layers = stage_layers(self.layout)
        kinds = [self.kind(layer) for layer in range(self.layout.layers)]
        counted = (Counter(kinds[layer] for stage in layers[rank::pp] for layer in stage) for rank in range(pp))
        return [tuple(each.items()) for each in counted]

    def kind(self, layer: int) -> LayerKind:
        model = self.model
        return LayerKind(model.is_moe_layer(layer), model.is_global_layer(layer), self.sizes.computes_fp8(layer))

    def layer(self, kind: LayerKind) -> Amounts:
        """A micro-batch in one layer, with what is recomputed for its backward pass."""
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
        """FLOPs of the products of a layer, forward and backward."""
        precision = "fp8" if kind.fp8 else "bf16"
        passes = [self._passes(each, precision) for each in self._shapes(kind)]
        return sum(each[0] for each in passes), sum(sum(each[1:]) for each in passes)

    def _passes(self, product: Product, precision: str) -> tuple[float, ...]:
        """FLOPs of the passes of a product, of weights' gradients where there are any."""
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
            of_weights = 2 * inner * columns if self.trained else 0  # sums are read, and written
            elements += together * (rows * columns * (2 if again else 1) + rows * inner + of_weights)
        return float(BF16 * elements)

    def _attention(self, kind: LayerKind) -> float:
        """FLOPs of the forward pass: the scores, and the sum of values, of the causal half."""
        recipe, layout = self.plan.recipe, self.layout
        pairs = attention_square(self.model, kind.attends_all, layout.seq_len, recipe.packing) / 2
        return 4.0 * self.sizes.query * pairs * layout.mbs / layout.cp

    def _moved(self, kind: LayerKind, *, again: bool) -> float:
        """Bytes of norms, residual sums, rotary embeddings and activations; backward they read what they read before,
        and a gradient."""
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
        """Elements that the activations of a layer compute."""
        sizes, moe = self.sizes, self.model.moe
        if not kind.experts or moe is None:
            return sizes.tokens * self.model.ffn_hidden_size // self.layout.tp
        shared = sizes.tokens * (moe.shared_ffn_hidden_size or 0) // self.layout.tp
        return shared + sizes.expert_rows() * moe.ffn_hidden_size // self.layout.etp

    def _routed(self, kind: LayerKind) -> float:
        """Bytes that tokens take on the way to experts and back: each way they are sorted once."""
        return 2 * 2 * BF16 * self.sizes.hidden * self.sizes.expert_rows() if kind.experts else 0.0

    def _cast(self, kind: LayerKind) -> float:
        """Bytes of casts: 2 are read of each element that a product reads, forward and backward, and 2 written, as it
        is and transposed; what tensor parallelism gathers in FP8 is transposed afterwards."""
        sizes = self.sizes
        inner = self._activated(kind)
        ends = 2 * sizes.hidden * sizes.shard
        inputs = ends + sizes.query * sizes.tokens + inner
        gradients = ends + (sizes.query + 2 * sizes.key) * sizes.tokens + sizes.products * inner
        gathered = 2 * 4 * sizes.hidden * sizes.tokens if self.layout.tp > 1 else 0
        return 4.0 * (inputs + gradients) + gathered

    def _messages(self, kind: LayerKind, *, again: bool) -> Iterator[Messages]:
        sizes, layout = self.sizes, self.layout
        whole = float(BF16 * sizes.hidden * sizes.tokens)
        passes = 2 if again else 1
        if layout.tp > 1 and layout.sequence_parallel:
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
            keys = float(2 * BF16 * sizes.key * sizes.tokens * layout.cp)
            yield Messages("all_gather", "cp", passes, keys)
            yield Messages("reduce_scatter", "cp", 1, keys)
        if kind.experts:
            yield from self._expert_messages(passes)

    @property
    def _has_shared(self) -> bool:
        return self.model.moe is not None and self.model.moe.shared_ffn_hidden_size is not None

    def _expert_messages(self, passes: int) -> Iterator[Messages]:
        """Tokens travel to experts and back, forward and backward."""
        sizes, layout = self.sizes, self.layout
        rows = BF16 * sizes.hidden * sizes.expert_rows()
        if layout.ep > 1:
            yield Messages("all_to_all", "ep", 2 * (passes + 1), rows / layout.etp)
        if layout.etp > 1:
            yield Messages("all_to_all", "etp", 2 * (passes + 1), float(rows))

    def first(self) -> Amounts:
        """The embedding."""
        sizes = self.sizes
        messages = self._end_messages() if self.layout.tp > 1 and self.layout.sequence_parallel else ()
        return Amounts({}, moved=float(4 * BF16 * sizes.hidden * sizes.tokens), messages=messages)

    def last(self) -> Amounts:
        """The head and the loss: products in bf16; logits are read and written in bf16, and as fp32 by the loss."""
        sizes = self.sizes
        messages = self._end_messages() if self.layout.tp > 1 and self.layout.sequence_parallel else ()
        return Amounts(
            {"bf16": sum(self._of_head)},
            moved=float((2 * BF16 + 3 * FP32) * sizes.tokens * sizes.vocabulary),
            messages=messages,
        )

    def _end_messages(self) -> tuple[Messages, ...]:
        whole = float(BF16 * self.sizes.hidden * self.sizes.tokens)
        return Messages("all_gather", "tp", 1, whole), Messages("reduce_scatter", "tp", 1, whole)

    def head_weight_gradient(self) -> float:
        """FLOPs of a micro-batch that may wait for the end of the pipeline's last stage."""
        return sum(self._of_head[2:])

    @property
    def _of_head(self) -> tuple[float, ...]:
        return self._passes(head_product(self.model, self.layout), "bf16")

    def between_stages(self) -> Messages:
        """Forward and backward messages of a micro-batch at the ends of each of a rank's stages."""
        return Messages("send", "pp", 2 * self.layout.vp, float(BF16 * self.sizes.hidden * self.sizes.shard))

    def parameters(self, rank: int) -> tuple[int, int]:
        """Elements that a rank of the pipeline trains: dense, and of routed experts."""
        sizes, kinds = self.sizes, self.stages[rank]
        if self.plan.lora is not None:
            return sum(count for _, count in kinds) * sizes.adapters(), 0
        tables = sizes.vocabulary * sizes.hidden
        ends = (rank == 0) + (rank == self.layout.pp - 1 and not (rank == 0 and self.model.tied_embeddings))
        dense = ends * tables + (rank == self.layout.pp - 1) * sizes.norm
        for kind, count in kinds:
            layer = self.examples[kind]
            dense += count * (sizes.matrices(layer) + sizes.others(layer))
        return dense, sum(count for kind, count in kinds if kind.experts) * sizes.expert_matrices()

    def of_step(self, parameters: tuple[int, int]) -> Iterator[Messages]:
        """Gradients and parameters of a rank, once a step; with ZeRO-3 parameters once a micro-batch."""
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

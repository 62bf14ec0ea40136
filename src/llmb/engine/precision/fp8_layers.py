# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8: matrices, alone or joined, whose products gather sharded inputs as FP8 bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from typing import cast as cast_type

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from llmb.engine.collectives import Context, Group, finish, fuses, start_scatter
from llmb.engine.kernels import elementwise
from llmb.engine.kernels.elementwise import Activation, Heads, Rotation
from llmb.engine.model.attention import Attention, Rotary, RotaryPosition
from llmb.engine.model.layers import GatedMLP, SquaredReluMLP
from llmb.engine.model.linear import SEQUENCE, Joined, Linear, gathered, local_shard, overlapped, scattered
from llmb.engine.precision.scaling import (
    ALIGNED,
    FORMATS,
    GRADIENT,
    INPUT,
    WEIGHT,
    Cast,
    Factor,
    Factors,
    Fp8Matrix,
    Kept,
    LayerScales,
    Scaled,
    cast_tensor,
    multiply,
)
from llmb.runs.attention_choice import ProductDtype

Gradients = tuple[Tensor | None, ...]


class ProductKind(NamedTuple):
    """The arguments of a product that are constants in compiled code."""

    delayed: bool
    product_dtype: ProductDtype
    activation: Activation | None
    group: Group | None
    """Ranks that each hold a shard of the sequence; None if the input is whole."""
    summed_over: Group | None
    batch: int
    """Number of sequences in the rows."""
    casts_again: bool
    """True if the backward pass casts ``hidden`` again, for the gradients of weights."""
    outputs: tuple[int, ...]
    """Number of outputs of each weight."""


class Operands(NamedTuple):
    """The operands of a product of [rows, inputs] and the transposes of weights, [outputs, inputs] each."""

    hidden: Tensor
    """Input before its cast, for its gradient and for casting it again."""
    probe: Tensor
    kind: ProductKind
    weights: Sequence[Tensor]
    values: Tensor
    transposed: Tensor | None
    amax: Tensor
    factors: Factors
    kept: tuple[Tensor, Tensor] | None
    """Weights in FP8, [sum of outputs, inputs], and their transpose; None if they are cast at every use."""


class Fp8Context(Context):
    kind: ProductKind
    keeps: bool
    interleaved: bool


def apply_to(function: type[Function], operands: Operands, *more: object) -> Any:  # noqa: ANN401 (what its ``forward`` returns)
    """Call ``function`` with one argument per operand, because autograd finds no tensors in records. Operands must be
    different tensors."""
    hidden, probe, kind, weights, *tensors, factors, kept = operands
    return function.apply(hidden, probe, kind, *weights, *tensors, *factors.numbers, *(kept or (None, None)), *more)


def restore(arguments: Sequence[Any]) -> tuple[Operands, Sequence[Any]]:
    """Return the operands that ``apply_to`` passed as ``arguments``, and the remaining arguments."""
    hidden, probe, kind, *rest = arguments
    weights, (values, transposed, amax, *rest) = rest[: len(kind.outputs)], rest[len(kind.outputs) :]
    factors, (matrix, matrix_transposed, *more) = Factors.of(rest[:6]), rest[6:]
    kept = None if matrix is None else (matrix, matrix_transposed)
    return Operands(hidden, probe, kind, weights, values, transposed, amax, factors, kept), more


def as_gradients(ctx: Fp8Context, hidden: Tensor | None, probe: Tensor, weights: Sequence[Tensor | None]) -> Gradients:
    """Return the gradients of all arguments that ``apply_to`` passes; None for an argument without a gradient."""
    first = hidden, probe, None, *weights
    return *first, *[None] * (len(ctx.needs_input_grad) - len(first))


def needed_gradients(ctx: Fp8Context) -> tuple[bool, bool]:
    """Return whether ``hidden`` needs a gradient, and whether any of the weights does."""
    hidden, _, _, *others = ctx.needs_input_grad
    return hidden, any(others[: len(ctx.kind.outputs)])


class Saved(NamedTuple):
    """The tensors that the backward pass reads."""

    rows: Tensor | None
    """The input's transpose, its values to gather again, or the uncast input; None without trained weights."""
    amax: Tensor
    """Largest absolute value of the input."""
    factors: Factors
    matrices: Sequence[Tensor]
    """Kept weights, transposed, or else the uncast weights."""
    more: Sequence[Tensor]
    """Further tensors of the function."""


def forward(operands: Operands) -> Tensor:
    """Return y = x w^T, [rows, sum of outputs] bf16, or this rank's shard of the sum over ranks."""
    kind, (factor, weight_factor, _) = operands.kind, operands.factors
    matrix = operands.kept[0] if operands.kept else cast_weights(operands.weights, weight_factor.scale)
    rows, columns = Scaled(operands.values, factor.inverse), Scaled(matrix, weight_factor.inverse).mT
    if kind.group is not None:
        return gather_multiply(rows, columns, kind, kind.group, fast=True)[1]
    if kind.summed_over is not None:
        return multiply_scatter(rows, columns, kind, kind.summed_over)
    return multiply(rows, columns, fast=True, product_dtype=kind.product_dtype)


def fuses_products(left: Scaled, right: Scaled, kind: ProductKind, group: Group) -> bool:
    """Return True if torch's fused operators compute the product of two FP8 matrices."""
    aligned = not any(size % ALIGNED for size in right.values.shape)
    return aligned and kind.product_dtype == "fp8" and fuses(left.values, group)


def gather_multiply(
    left: Scaled, right: Scaled, kind: ProductKind, group: Group, *, fast: bool
) -> tuple[Tensor, Tensor]:
    """Gather ``left``, rows of this rank's shard of the sequence; return all rows, and their product with ``right``."""
    values = left.values
    if fuses_products(left, right, kind, group):
        shard, scales = torch.unflatten(values, 0, (kind.batch, -1)), (left.inverse, [right.inverse])
        rest = SEQUENCE, group.name, [None], [None], [torch.bfloat16], [fast]
        whole, (product,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(shard, [right.values], *scales, *rest)
        return whole.flatten(0, 1), product.flatten(0, 1)
    rows = as_rows(gathered(as_bytes(values, kind.batch), group), values.dtype)
    return rows, multiply(Scaled(rows, left.inverse), right, fast=fast, product_dtype=kind.product_dtype)


def multiply_scatter(left: Scaled, right: Scaled, kind: ProductKind, group: Group) -> Tensor:
    """Sum the product over the ranks; return this rank's shard: [batch, seq / ranks, outputs]."""
    if fuses_products(left, right, kind, group):
        whole = torch.unflatten(left.values, 0, (kind.batch, -1))
        shape = [*whole.shape[:-1], right.values.shape[1]]
        rest = "sum", SEQUENCE, SEQUENCE, group.name, shape, None, None, torch.bfloat16, True
        operator = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        shard: Tensor = operator(whole, right.values, left.inverse, right.inverse, *rest)
        return shard
    product = multiply(left, right, fast=True, product_dtype=kind.product_dtype)
    return scattered(torch.unflatten(product, 0, (kind.batch, -1)), group)


def save(ctx: Fp8Context, operands: Operands, more: Sequence[Tensor] = ()) -> None:
    """Save the tensors that ``backward`` reads, and ``more``."""
    kind, kept, rows = operands.kind, operands.kept, operands.transposed
    ctx.kind, ctx.keeps = kind, kept is not None
    if needed_gradients(ctx)[1]:
        if kind.group is not None:
            rows = operands.values
        elif kind.casts_again:
            rows = operands.hidden
    matrices = operands.weights if kept is None else kept[1:]
    ctx.save_for_backward(rows, operands.amax, *operands.factors.numbers, *matrices, *more)


def load_saved(ctx: Fp8Context) -> Saved:
    """Return the tensors that ``save`` saved. Call it once per backward pass: recomputation permits no more."""
    rows, amax, *rest = ctx.saved_tensors
    matrices = 1 if ctx.keeps else len(ctx.kind.outputs)
    return Saved(rows, amax, Factors.of(rest[:6]), rest[6 : 6 + matrices], rest[6 + matrices :])


def transposed_weights(ctx: Fp8Context, saved: Saved) -> Tensor:
    """Return the transpose of the weights in FP8 as one matrix."""
    first, *_ = saved.matrices
    return first if ctx.keeps else cast_weights(saved.matrices, saved.factors.weight.scale).t().contiguous()


def backward(ctx: Fp8Context, saved: Saved, gradient: Cast, to_hidden: Tensor | None = None) -> Gradients:
    """Return the gradients of all arguments: dx = dy w, dw = dy^T x. ``gradient``: dy in FP8."""
    kind, rows, transposed = ctx.kind, saved.rows, gradient.transposed
    (scale, inverse), factor, _ = saved.factors
    has_gradient, _ = needed_gradients(ctx)
    trained = transposed is not None and rows is not None
    to_weights: Tensor | None = None
    if to_hidden is None and (has_gradient or (trained and kind.group is not None)):
        matrix = transposed_weights(ctx, saved)
        to_input = gradient.values, gradient.inverse, matrix, factor.inverse, kind.product_dtype
        if kind.group is None:
            to_hidden = gradient_product(*to_input)
        elif transposed is None or rows is None:
            whole = torch.unflatten(gradient_product(*to_input), 0, (kind.batch, -1))
            to_hidden = finish(start_scatter(whole, SEQUENCE, kind.group), SEQUENCE).flatten(0, 1)
        else:
            compute = shard_gradients if torch.compiler.is_compiling() else _shard_gradients
            to_hidden, to_weights = compute(*to_input, transposed, rows, inverse, kind.batch, *kind.group[:3])
    if kind.group is None and transposed is not None and rows is not None:
        of_outputs = transposed, gradient.inverse
        if kind.casts_again:
            multiply_cast = cast_product if torch.compiler.is_compiling() else _cast_product
            to_weights = multiply_cast(*of_outputs, rows, scale, inverse, kind.product_dtype)
        else:
            to_weights = gradient_product(*of_outputs, rows, inverse, kind.product_dtype)
    of_weights = [None] * len(kind.outputs) if to_weights is None else torch.split(to_weights, list(kind.outputs))
    return as_gradients(ctx, to_hidden, torch.stack((saved.amax, gradient.amax)), of_weights)


def gradient_product(left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, dtype: str) -> Tensor:
    """Return ``left`` [m, k] times the transpose of ``right`` [n, k], both row-major."""
    product_dtype = cast_type(ProductDtype, dtype)
    scaled = Scaled(left, left_inverse), Scaled(right, right_inverse).mT
    return multiply(*scaled, fast=False, product_dtype=product_dtype)


def _cast_product(
    transposed: Tensor, inverse: Tensor, rows: Tensor, scale: Tensor, rows_inverse: Tensor, dtype: str
) -> Tensor:
    """One operator in compiled code: otherwise the compiler would cast in the forward pass and save the cast."""
    cast_rows = elementwise.cast_both_ways(rows, scale, FORMATS[INPUT])[1]
    return gradient_product(transposed, inverse, cast_rows, rows_inverse, dtype).contiguous()


cast_product = torch.library.custom_op("llmb::fp8_cast_product", _cast_product, mutates_args=())


@cast_product.register_fake
def _(transposed: Tensor, _inverse: Tensor, rows: Tensor, *_: object) -> Tensor:
    return rows.new_empty((len(transposed), rows.shape[1]), dtype=torch.bfloat16)


def _shard_gradients(
    values: Tensor,
    inverse: Tensor,
    weight: Tensor,
    weight_inverse: Tensor,
    dtype: str,
    transposed: Tensor,
    shard: Tensor,
    shard_inverse: Tensor,
    batch: int,
    name: str,
    size: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``shard`` and of the weights, see ``model.linear``. values, transposed: dy in FP8."""

    def to_input() -> Tensor:
        return torch.unflatten(gradient_product(values, inverse, weight, weight_inverse, dtype), 0, (batch, -1))

    def to_weights(whole: Tensor) -> Tensor:
        rows = elementwise.transpose(as_rows(whole, shard.dtype))
        return gradient_product(transposed, inverse, rows, shard_inverse, dtype).contiguous()

    to_shard, of_weights = overlapped(as_bytes(shard, batch), Group(name, size, rank), to_input, to_weights)
    return to_shard.flatten(0, 1), of_weights


shard_gradients = torch.library.custom_op("llmb::fp8_shard_gradients", _shard_gradients, mutates_args=())


@shard_gradients.register_fake
def _(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    transposed, shard = arguments[5:7]
    of_weights = shard.new_empty((len(transposed), shard.shape[1]), dtype=torch.bfloat16)
    return shard.new_empty(shard.shape, dtype=torch.bfloat16), of_weights


def as_bytes(rows: Tensor, batch: int) -> Tensor:
    """Return [rows, columns] in FP8, which not every collective supports, as bytes: [batch, seq, columns]."""
    return torch.unflatten(rows.view(torch.uint8), 0, (batch, -1))


def as_rows(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gathered bytes, [batch, seq, columns], as rows in FP8: the inverse of ``as_bytes``."""
    return whole.flatten(0, 1).view(dtype)


def cast_weights(weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    casts = [elementwise.cast(weight, scale, FORMATS[WEIGHT]) for weight in weights]
    return torch.cat(casts) if len(casts) > 1 else casts[0]


def without_values(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a placeholder, with a gradient but without memory, for a result whose uncast values are not used."""
    return like.new_zeros(()).expand(shape)


def without_gradients(ctx: FunctionCtx, *outputs: Tensor) -> None:
    ctx.mark_non_differentiable(*outputs)
    if not torch.compiler.is_compiling():  # The compiler does not know this; it drops unused zeros by itself.
        ctx.set_materialize_grads(False)


class ProductFunction(torch.autograd.Function):
    """The product, [rows, sum of outputs] bf16, or this rank's shard of a sum over ranks, [batch, seq, outputs]."""

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> Tensor:  # noqa: ANN401 (torch's interface)
        operands, _ = restore(arguments)
        save(ctx, operands)
        return forward(operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, gradient: Tensor) -> Gradients:
        saved, delayed, (_, trained) = load_saved(ctx), ctx.kind.delayed, needed_gradients(ctx)
        factor, group = saved.factors.gradient, ctx.kind.summed_over
        if group is None:
            scaled = cast_tensor(gradient, GRADIENT, factor, delayed=delayed, transposes=trained)
            return backward(ctx, saved, scaled)
        rows = gradient.flatten(0, 1)
        scaled = cast_tensor(rows, GRADIENT, factor, delayed=delayed, transposes=False, group=group)
        columns = Scaled(transposed_weights(ctx, saved), saved.factors.weight.inverse).mT
        whole, to_hidden = gather_multiply(Scaled(scaled.values, scaled.inverse), columns, ctx.kind, group, fast=False)
        transposed = elementwise.transpose(whole) if trained else None
        return backward(ctx, saved, scaled._replace(values=whole, transposed=transposed), to_hidden)


class Fp8Activated(torch.autograd.Function):
    """The product, and its activation as a placeholder without values; requires trained weights and delayed scaling."""

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (torch's interface)
        operands, _ = restore(arguments)
        product = forward(operands)
        save(ctx, operands, [product])
        without_gradients(ctx, product)
        rows, columns = product.shape
        features = columns // 2 if operands.kind.activation == "swiglu" else columns
        return product, without_values(product, (rows, features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, _product: None, gradient: Tensor) -> Gradients:
        saved = load_saved(ctx)
        (product,), activation = saved.more, ctx.kind.activation
        assert activation is not None
        scale, inverse = saved.factors.gradient
        values, transposed, amax = elementwise.cast_activation_gradient(
            product, gradient, scale, activation, FORMATS[GRADIENT]
        )
        return backward(ctx, saved, Cast(values, transposed, inverse, amax))


class Fp8Rotated(torch.autograd.Function):
    """Rotated query and key, and value: [batch, seq, heads, head_dim] each."""

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 (torch's interface)
        operands, (cos, sin, interleaved, head_dim) = restore(arguments)
        ctx.interleaved, rotation = interleaved, Rotation(cos, sin, interleaved)
        save(ctx, operands, [cos, sin])
        product = forward(operands)
        sizes = [outputs // head_dim for outputs in operands.kind.outputs]
        heads = product.view(operands.kind.batch, -1, sum(sizes), head_dim)
        query, key, value = torch.split(heads, sizes, -2)
        factors = elementwise.factors_of(rotation)
        # A view of the product would keep queries and keys for the backward pass, from before the rotation.
        return elementwise.rotate(query, factors), elementwise.rotate(key, factors), value.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, *gradients: Tensor) -> Gradients:
        saved = load_saved(ctx)
        cos, sin = saved.more
        rotation = Rotation(cos, sin, ctx.interleaved)
        scale, inverse = saved.factors.gradient
        values, transposed, amax = elementwise.cast_rotated_gradient(
            Heads(*gradients), rotation, scale, FORMATS[GRADIENT]
        )
        return backward(ctx, saved, Cast(values, transposed, inverse, amax))


class CastInput(NamedTuple):
    """A layer's input that is already cast; ``hidden``, [..., inputs], represents it in autograd's graph."""

    hidden: Tensor
    cast: Cast


class Fp8Linear(Fp8Matrix, Linear):
    """The layer ``whole`` in FP8: [..., inputs] to [..., outputs], bf16."""

    casts_again = False
    """True if the backward pass casts the input again, instead of saving the cast."""

    def __init__(self, whole: Linear, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight = whole.weight
        self.register_parameter("bias", None)
        self.adapter = None
        self.set_scales(layer_scales, product_dtype)

    @property
    def layers(self) -> tuple["Fp8Linear", ...]:
        return (self,)

    def matrix(self) -> Tensor:
        return local_shard(self.weight)

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
        return self.adapted(product_of(self, hidden), hidden)


class Fp8Joined(Joined):
    """Layers with the same input, which is cast once, for one product, and with the same scales."""

    kept: Kept | None = None
    """Cast weights of all layers as one matrix; each layer keeps its part of it."""

    @property
    def layers(self) -> tuple[Fp8Linear, ...]:
        return tuple(getattr(self.owner, name) for name in self.names)

    def __call__(self, hidden: Tensor, head_dim: int | None = None) -> tuple[Tensor, ...]:
        return self.adapted(self.split(product_of(self, hidden), head_dim), hidden)

    @torch.no_grad()
    def keep_weight(self) -> None:
        """Cast the gathered weights of all layers, and keep the casts until ``kept`` is reset."""
        if self.kept is not None:
            return
        weights = [local_shard(layer.weight) for layer in self.layers]
        rows, columns = sum(map(len, weights)), weights[0].shape[1]
        values = weights[0].new_empty((rows, columns), dtype=FORMATS[WEIGHT])
        transposed = weights[0].new_empty((columns, rows), dtype=FORMATS[WEIGHT])
        amax = weights[0].new_empty((), dtype=torch.float32)
        first = 0
        for layer, weight in zip(self.layers, weights, strict=True):
            part = slice(first, first + len(weight))
            layer.kept = values[part], transposed[:, part]
            elementwise.cast_into(weight, layer.layer_scales.factors.weight.scale, *layer.kept, amax)
            first += len(weight)
        self.kept = values, transposed


def operands(
    layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput, activation: Activation | None = None
) -> Operands:
    """Return the operands of a product with ``hidden``, [..., inputs], which is cast unless it is a ``CastInput``."""
    first, *_ = layer.layers
    scales, group = first.layer_scales, first.group
    weights = [local_shard(each.weight) for each in layer.layers]
    if not isinstance(hidden, CastInput):
        # Only gradients of weights need the input's transpose.
        transposes = group is None and not first.casts_again and any(each.requires_grad for each in weights)
        rows, factor = hidden.detach().flatten(0, -2), scales.factors.input
        scaled = cast_tensor(rows, INPUT, factor, delayed=scales.delayed, transposes=transposes, group=group)
        hidden = CastInput(hidden, scaled)
    (values, transposed, inverse, amax), outputs = hidden.cast, tuple(map(len, weights))
    batch, rows = hidden.hidden.shape[0], hidden.hidden.flatten(0, -2)
    groups = group, first.summed_over
    kind = ProductKind(scales.delayed, first.product_dtype, activation, *groups, batch, first.casts_again, outputs)
    factors = scales.factors._replace(input=Factor(scales.factors.input.scale, inverse))
    return Operands(rows, scales.probe, kind, weights, values, transposed, amax, factors, layer.kept)


def product_of(layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput) -> Tensor:
    """Return the product of a layer with ``hidden``: [..., sum of outputs]."""
    used = operands(layer, hidden)
    product: Tensor = apply_to(ProductFunction, used)
    return product if used.kind.summed_over else as_sequences(product, hidden)


def as_sequences(rows: Tensor, hidden: Tensor | CastInput) -> Tensor:
    """Return the rows as [..., seq, columns], with the leading dimensions of ``hidden`` and whole sequences."""
    shape = hidden.hidden.shape if isinstance(hidden, CastInput) else hidden.shape
    return torch.unflatten(rows, 0, (*shape[:-2], -1))


def begin_activation(first: Fp8Linear | Fp8Joined, hidden: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the product of ``first``, [rows, outputs], and a placeholder for its activation, [..., features]."""
    product, activated = apply_to(Fp8Activated, operands(first, hidden, activation))
    return product, as_sequences(activated, hidden)


def cast_activation(product: Tensor, activated: Tensor, last: nn.Module, activation: Activation) -> CastInput:
    """Return the activation of a product, see ``begin_activation``, cast as the input of ``last``."""
    assert isinstance(last, Fp8Linear)
    scale, inverse = last.layer_scales.factors.input
    values, transposed, amax = elementwise.cast_activated(product, scale, activation, FORMATS[INPUT])
    return CastInput(activated, Cast(values, transposed, inverse, amax))


class Fp8GatedMLP(GatedMLP):
    """An MLP that casts the results of SwiGLU as it computes them."""

    def begin(self, hidden: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(self.gate_up, Fp8Joined)
        return begin_activation(self.gate_up, hidden, "swiglu")

    def end(self, product: Tensor, activated: Tensor) -> Tensor:
        output: Tensor = self.down_proj(cast_activation(product, activated, self.down_proj, "swiglu"))
        return output


class Fp8SquaredReluMLP(SquaredReluMLP):
    """An MLP that casts the results of the squared ReLU as it computes them."""

    def forward(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.up_proj, Fp8Linear)
        begun = begin_activation(self.up_proj, hidden, "squared-relu")
        output: Tensor = self.down_proj(cast_activation(*begun, self.down_proj, "squared-relu"))
        return output


class RotatedAttention(Attention):
    """Attention that casts gradients as it rotates them back. Use it only where ``only_rotates`` is True."""

    def rotated(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qkv, Fp8Joined)
        query, key, value = apply_to(Fp8Rotated, operands(self.qkv, hidden), *rotary.rotation, self.head_dim)
        return query, key, value


def only_rotates(attention: Attention) -> bool:
    return isinstance(attention.position, RotaryPosition) and attention.q_norm is None and not attention.biased

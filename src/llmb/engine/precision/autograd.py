# SPDX-License-Identifier: Apache-2.0
"""What is computed in FP8, forward and backward, as functions of torch's autograd.

A product of one weight, or of several below each other; and the same with what comes after it in one pass over memory:
an activation, the rotation of queries and keys. A product gathers its input as bytes of FP8 if that is a shard of the
sequence (``model.shards``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from typing import cast as cast_type

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.collectives import Group, finish, start_scatter
from llmb.engine.kernels.fp8_cast import Activation, cast, cast_activation_gradient, cast_both_ways, transpose
from llmb.engine.kernels.rotary import Heads, Rotation, cast_rotated_gradient, factors_of, rotate
from llmb.engine.model.shards import SEQUENCE, gathered, overlapped
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Cast, Factor, Scaled, cast_tensor, multiply
from llmb.engine.typed_autograd import Context, save_for_backward
from llmb.runs.attention_choice import ProductDtype

Gradients = tuple[Tensor | None, ...]


class ProductKind(NamedTuple):
    """What the compiler knows of a product.

    group: the ranks with a shard each of the sequence, which the product gathers in FP8; None if the input is whole.
    batch: how many sequences the rows are of. casts_again: whether the backward pass casts ``hidden`` by the scale of
    the input again, for the gradients of weights.
    """

    delayed: bool
    product_dtype: ProductDtype
    activation: Activation | None
    group: Group | None
    batch: int
    casts_again: bool


class Operands(NamedTuple):
    """Arguments of functions that multiply; weights follow, [outputs, inputs] each, and whatever else they need.

    hidden: [rows, inputs], of which only the gradient is used; the input's values are the cast, ``Cast``.
    kept: the weights in FP8 as one matrix, [sum of outputs, inputs], and its transpose; None casts them at every use.
    probe: see ``LayerScales``.
    """

    hidden: Tensor
    values: Tensor
    transposed: Tensor | None
    input_scale: Tensor
    input_inverse: Tensor
    input_amax: Tensor
    kept: Tensor | None
    kept_transposed: Tensor | None
    weight_scale: Tensor
    weight_inverse: Tensor
    gradient_scale: Tensor
    gradient_inverse: Tensor
    probe: Tensor
    kind: ProductKind


HIDDEN, PROBE = Operands._fields.index("hidden"), Operands._fields.index("probe")
WEIGHTS = len(Operands._fields)


class Saved(NamedTuple):
    """For the backward pass.

    rows: the input's transpose, or its values where they are gathered again, or the input itself where it is cast
    again; None without trained weights. held: the kept transposed weights, or else the weights. more: what a function
    saves besides.
    """

    rows: Tensor | None
    input_scale: Tensor
    input_inverse: Tensor
    input_amax: Tensor
    weight_scale: Tensor
    weight_inverse: Tensor
    gradient: Factor
    held: Sequence[Tensor]
    more: Sequence[Tensor]


class Fp8Context(Context):
    kind: ProductKind
    keeps: bool
    held: int
    outputs: list[int]
    interleaved: bool


def forward(ctx: Fp8Context, operands: Operands, weights: Sequence[Tensor]) -> Tensor:
    """y = x w^T; ``save`` keeps what ``backward`` needs of it."""
    kept, ctx.kind = operands.kept, operands.kind
    matrix = cast_weights(weights, operands.weight_scale) if kept is None else kept
    ctx.keeps, ctx.outputs = kept is not None, [len(weight) for weight in weights]
    values = operands.values
    if ctx.kind.group is not None:
        values = as_rows(gathered(as_bytes(values, ctx.kind.batch), ctx.kind.group), values.dtype)
    taken, turned = Scaled(values, operands.input_inverse), Scaled(matrix, operands.weight_inverse).mT
    return multiply(taken, turned, fast=True, product_dtype=ctx.kind.product_dtype)


def save(ctx: Fp8Context, operands: Operands, weights: Sequence[Tensor], more: Sequence[Tensor] = ()) -> None:
    held = weights if operands.kept_transposed is None else [operands.kept_transposed]
    ctx.held, rows = len(held), operands.transposed
    if any(ctx.needs_input_grad[WEIGHTS : WEIGHTS + len(weights)]):
        if operands.kind.group is not None:
            rows = operands.values
        elif operands.kind.casts_again:
            rows = operands.hidden
    save_for_backward(
        ctx,
        rows,
        operands.input_scale,
        operands.input_inverse,
        operands.input_amax,
        operands.weight_scale,
        operands.weight_inverse,
        operands.gradient_scale,
        operands.gradient_inverse,
        *held,
        *more,
    )


def saved(ctx: Fp8Context) -> Saved:
    """To be called once in a backward pass: recomputation permits no more."""
    rows, input_scale, input_inverse, input_amax, scale, inverse, own_scale, own_inverse, *others = ctx.saved_tensors
    held, more = others[: ctx.held], others[ctx.held :]
    gradient = Factor(own_scale, own_inverse)
    return Saved(rows, input_scale, input_inverse, input_amax, scale, inverse, gradient, held, more)


def backward(ctx: Fp8Context, kept: Saved, given: Cast) -> Gradients:
    """dx = dy w, dw = dy^T x; each FP8 matrix is stored for both sides of a product (see ``multiply``)."""
    group, product_dtype = ctx.kind.group, ctx.kind.product_dtype
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    found[PROBE] = torch.stack((kept.input_amax, given.amax))
    to_weights: Tensor | None = None
    trained = given.transposed is not None and kept.rows is not None
    if ctx.needs_input_grad[HIDDEN] or (trained and group is not None):
        weight = kept.held[0] if ctx.keeps else cast_weights(kept.held, kept.weight_scale).t().contiguous()
        to_input = given.values, given.inverse, weight, kept.weight_inverse, product_dtype
        if group is None:
            found[HIDDEN] = gradient_product(*to_input)
        elif given.transposed is None or kept.rows is None:
            whole = torch.unflatten(gradient_product(*to_input), 0, (ctx.kind.batch, -1))
            found[HIDDEN] = finish(start_scatter(whole, SEQUENCE, group), SEQUENCE).flatten(0, 1)
        else:
            compute = shard_gradients if torch.compiler.is_compiling() else _shard_gradients
            of_shard = given.transposed, kept.rows, kept.input_inverse, ctx.kind.batch
            found[HIDDEN], to_weights = compute(*to_input, *of_shard, *group)
    if group is None and given.transposed is not None and kept.rows is not None:
        of_outputs = given.transposed, given.inverse
        if ctx.kind.casts_again:
            multiply_cast = cast_product if torch.compiler.is_compiling() else _cast_product
            to_weights = multiply_cast(*of_outputs, kept.rows, kept.input_scale, kept.input_inverse, product_dtype)
        else:
            to_weights = gradient_product(*of_outputs, kept.rows, kept.input_inverse, product_dtype)
    if to_weights is not None:
        found[WEIGHTS : WEIGHTS + len(ctx.outputs)] = torch.split(to_weights, ctx.outputs)
    return tuple(found)


def gradient_product(left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, dtype: str) -> Tensor:
    """``left`` [m, k] times the transpose of ``right`` [n, k], both row-major."""
    product_dtype = cast_type(ProductDtype, dtype)
    scaled = Scaled(left, left_inverse), Scaled(right, right_inverse).mT
    return multiply(*scaled, fast=False, product_dtype=product_dtype)


def _cast_product(
    transposed: Tensor, inverse: Tensor, rows: Tensor, scale: Tensor, rows_inverse: Tensor, dtype: str
) -> Tensor:
    """``gradient_product`` of ``transposed`` with ``rows``, which are cast.

    Compiled code has it as one operator: the compiler would cast in the forward pass, and keep the cast.
    """
    cast_rows = cast_both_ways(rows, scale, FORMATS[INPUT])[1]
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
    """See ``model.shards``. values, transposed: the gradient of the outputs, cast both ways."""

    def to_input() -> Tensor:
        return torch.unflatten(gradient_product(values, inverse, weight, weight_inverse, dtype), 0, (batch, -1))

    def to_weights(whole: Tensor) -> Tensor:
        rows = transpose(as_rows(whole, shard.dtype))
        return gradient_product(transposed, inverse, rows, shard_inverse, dtype).contiguous()

    to_shard, of_weights = overlapped(as_bytes(shard, batch), Group(name, size, rank), to_input, to_weights)
    return to_shard.flatten(0, 1), of_weights


shard_gradients = torch.library.custom_op("llmb::fp8_shard_gradients", _shard_gradients, mutates_args=())


@shard_gradients.register_fake
def _(
    _values: Tensor,
    _inverse: Tensor,
    _weight: Tensor,
    _weight_inverse: Tensor,
    _dtype: str,
    transposed: Tensor,
    shard: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    of_weights = shard.new_empty((len(transposed), shard.shape[1]), dtype=torch.bfloat16)
    return shard.new_empty(shard.shape, dtype=torch.bfloat16), of_weights


def as_bytes(rows: Tensor, batch: int) -> Tensor:
    """[rows, columns] in FP8, which not every collective knows, as [batch, seq, columns]."""
    return torch.unflatten(rows.view(torch.uint8), 0, (batch, -1))


def as_rows(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse."""
    return whole.flatten(0, 1).view(dtype)


def cast_weights(weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    casts = [cast(weight, scale, FORMATS[WEIGHT]) for weight in weights]
    return torch.cat(casts) if len(casts) > 1 else casts[0]


def without_values(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for a result that is only cast: it has a gradient, and takes no memory."""
    return like.new_zeros(()).expand(shape)


def without_gradients(ctx: FunctionCtx, *outputs: Tensor) -> None:
    ctx.mark_non_differentiable(*outputs)
    if not torch.compiler.is_compiling():  # The compiler does not know this; it drops unused zeros by itself.
        ctx.set_materialize_grads(False)


class ProductFunction(torch.autograd.Function):
    """[rows, sum of outputs]."""

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> Tensor:  # noqa: ANN401 (torch's interface)
        operands, weights = Operands(*arguments[:WEIGHTS]), arguments[WEIGHTS:]
        save(ctx, operands, weights)
        return forward(ctx, operands, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, gradient: Tensor) -> Gradients:
        kept = saved(ctx)
        trained = any(ctx.needs_input_grad[WEIGHTS:])
        given = cast_tensor(gradient, GRADIENT, kept.gradient, delayed=ctx.kind.delayed, transposes=trained)
        return backward(ctx, kept, given)


class Fp8Activated(torch.autograd.Function):
    """The product, and what stands for its activation: only the latter has a gradient, and no values.

    So the gradient of the product is never stored in bf16. For trained weights and delayed scaling.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (torch's interface)
        operands, weights = Operands(*arguments[:WEIGHTS]), arguments[WEIGHTS:]
        product = forward(ctx, operands, weights)
        save(ctx, operands, weights, [product])
        without_gradients(ctx, product)
        rows, columns = product.shape
        features = columns // 2 if operands.kind.activation == "swiglu" else columns
        return product, without_values(product, (rows, features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, _product: None, gradient: Tensor) -> Gradients:
        kept = saved(ctx)
        (product,), activation = kept.more, ctx.kind.activation
        assert activation is not None
        scaled, transposed, amax = cast_activation_gradient(
            product, gradient, kept.gradient.scale, activation, FORMATS[GRADIENT]
        )
        return backward(ctx, kept, Cast(scaled, transposed, kept.gradient.inverse, amax))


class Fp8Rotated(torch.autograd.Function):
    """Rotated query and key, and value: [batch, seq, heads, head_dim] each.

    Arguments: ``Operands``, weights, ``Rotation`` and head_dim.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 (torch's interface)
        given = Operands(*arguments[:WEIGHTS])
        *weights, cos, sin, interleaved, head_dim = arguments[WEIGHTS:]
        ctx.interleaved, rotation = interleaved, Rotation(cos, sin, interleaved)
        save(ctx, given, weights, [cos, sin])
        product = forward(ctx, given, weights)
        of_query, of_key, of_value = (size // head_dim for size in ctx.outputs)
        heads = product.view(given.kind.batch, -1, of_query + of_key + of_value, head_dim)
        query, key, value = torch.split(heads, [of_query, of_key, of_value], -2)
        factors = factors_of(rotation)
        # A view of the product would keep queries and keys for the backward pass, from before the rotation.
        return rotate(query, factors), rotate(key, factors), value.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, *gradients: Tensor) -> Gradients:
        kept = saved(ctx)
        cos, sin = kept.more
        rotation = Rotation(cos, sin, ctx.interleaved)
        scale, inverse = kept.gradient
        values, transposed, amax = cast_rotated_gradient(Heads(*gradients), rotation, scale, FORMATS[GRADIENT])
        return backward(ctx, kept, Cast(values, transposed, inverse, amax))

# SPDX-License-Identifier: Apache-2.0
"""What is computed in FP8, forward and backward, as functions of torch's autograd.

A product of one weight, or of several below each other; and the same with what comes before or after it in one pass
over memory: an activation, a norm, the rotation of queries and keys. Functions that normalize return the hidden states,
too: the gradients of both of their uses meet in one backward function.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.kernels.arguments import Activation, Heads, Normalized, NormGradients, NormOf, Rotation
from llmb.engine.kernels.fp8_cast import cast, cast_activation_gradient
from llmb.engine.kernels.norm import normalize_and_cast, normalize_backward, normalize_backward_and_cast
from llmb.engine.kernels.rotary import cast_rotated_gradient, rotate, rotate_in_place
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Cast, Factor, Scaled, cast_tensor, multiply
from llmb.engine.typed_autograd import save_for_backward
from llmb.runs.attention import ProductDtype

Gradients = tuple[Tensor | None, ...]
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The hidden states; what stands for them normalized, of which only the gradient is used; and their cast."""


class Operands(NamedTuple):
    """Arguments of functions that multiply; weights follow, [outputs, inputs] each, and whatever else they need.

    hidden: [rows, inputs], of which only the gradient is used; the input's values are the cast, ``Cast``.
    kept: the weights in FP8 as one matrix, [sum of outputs, inputs], and its transpose; None casts them at every use.
    probe: see ``LayerScales``.
    """

    hidden: Tensor
    values: Tensor
    transposed: Tensor | None
    input_inverse: Tensor
    input_amax: Tensor
    kept: Tensor | None
    kept_transposed: Tensor | None
    weight_scale: Tensor
    weight_inverse: Tensor
    gradient_scale: Tensor
    gradient_inverse: Tensor
    probe: Tensor
    delayed: bool
    product_dtype: ProductDtype
    activation: Activation | None


HIDDEN, PROBE = Operands._fields.index("hidden"), Operands._fields.index("probe")
WEIGHTS = len(Operands._fields)


class Saved(NamedTuple):
    """For the backward pass.

    rows: the input's transpose. held: the kept transposed weights, or else the weights. more: what a function saves
    besides.
    """

    rows: Tensor | None
    input_inverse: Tensor
    input_amax: Tensor
    weight_scale: Tensor
    weight_inverse: Tensor
    gradient: Factor
    held: Sequence[Tensor]
    more: Sequence[Tensor]


class Fp8Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    keeps: bool
    held: int
    delayed: bool
    product_dtype: ProductDtype
    activation: Activation
    interleaved: bool
    outputs: list[int]


def forward(ctx: Fp8Context, operands: Operands, weights: Sequence[Tensor]) -> Tensor:
    """y = x w^T; ``save`` keeps what ``backward`` needs of it."""
    kept = operands.kept
    matrix = cast_weights(weights, operands.weight_scale) if kept is None else kept
    ctx.keeps, ctx.delayed, ctx.product_dtype = kept is not None, operands.delayed, operands.product_dtype
    ctx.outputs = [len(weight) for weight in weights]
    taken, turned = Scaled(operands.values, operands.input_inverse), Scaled(matrix, operands.weight_inverse).mT
    return multiply(taken, turned, fast=True, product_dtype=operands.product_dtype)


def save(ctx: Fp8Context, operands: Operands, weights: Sequence[Tensor], more: Sequence[Tensor | None] = ()) -> None:
    held = weights if operands.kept_transposed is None else [operands.kept_transposed]
    ctx.held = len(held)
    save_for_backward(
        ctx,
        operands.transposed,
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
    rows, input_inverse, input_amax, scale, inverse, own_scale, own_inverse, *others = ctx.saved_tensors
    held, more = others[: ctx.held], others[ctx.held :]
    return Saved(rows, input_inverse, input_amax, scale, inverse, Factor(own_scale, own_inverse), held, more)


def backward(ctx: Fp8Context, kept: Saved, given: Cast) -> Gradients:
    """dx = dy w, dw = dy^T x; each FP8 matrix is stored for both sides of a product (see ``multiply``)."""
    product = partial(multiply, fast=False, product_dtype=ctx.product_dtype)
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    found[PROBE] = torch.stack((kept.input_amax, given.amax))
    if ctx.needs_input_grad[HIDDEN]:
        weight = kept.held[0] if ctx.keeps else cast_weights(kept.held, kept.weight_scale).t().contiguous()
        found[HIDDEN] = product(Scaled(given.values, given.inverse), Scaled(weight, kept.weight_inverse).mT)
    if given.transposed is not None and kept.rows is not None:
        columns = Scaled(kept.rows, kept.input_inverse).mT
        to_weights = product(Scaled(given.transposed, given.inverse), columns)
        found[WEIGHTS : WEIGHTS + len(ctx.outputs)] = torch.split(to_weights, ctx.outputs)
    return tuple(found)


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
        given = cast_tensor(gradient, GRADIENT, kept.gradient, delayed=ctx.delayed, transposes=trained)
        return backward(ctx, kept, given)


class Fp8Activated(torch.autograd.Function):
    """The product, and what stands for its activation: only the latter has a gradient, and no values.

    So the gradient of the product is never stored in bf16. For trained weights and delayed scaling.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (torch's interface)
        operands, weights = Operands(*arguments[:WEIGHTS]), arguments[WEIGHTS:]
        assert operands.activation is not None
        ctx.activation = operands.activation
        product = forward(ctx, operands, weights)
        save(ctx, operands, weights, [product])
        without_gradients(ctx, product)
        rows, columns = product.shape
        features = columns // 2 if operands.activation == "swiglu" else columns
        return product, without_values(product, (rows, features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, _product: None, gradient: Tensor) -> Gradients:
        kept = saved(ctx)
        (product,) = kept.more
        scaled, transposed, amax = cast_activation_gradient(
            product, gradient, kept.gradient.scale, ctx.activation, FORMATS[GRADIENT]
        )
        return backward(ctx, kept, Cast(scaled, transposed, kept.gradient.inverse, amax))


class Fp8Norm(torch.autograd.Function):
    """Norm of hidden states, [..., columns]; ``NormOf`` and the scale of the cast follow."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor
    ) -> Results:
        found = normalize_and_cast(hidden, None, NormOf(weight, bias, eps), scale, FORMATS[INPUT])
        save_for_backward(ctx, hidden, found.mean, found.factor, weight)
        return results(ctx, found._replace(hidden=hidden.view_as(hidden)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, passed: Tensor, given: Tensor, *_cast: None) -> Gradients:
        hidden, mean, factor, weight = ctx.saved_tensors
        found = normalize_backward(given, passed, hidden, mean, factor, weight)
        return found.hidden, *of_parameters(found, weight), None, None


class Fp8ProductNorm(torch.autograd.Function):
    """Norm of the sum of a product and hidden states, [..., columns].

    The arguments of a product with one weight; then those of ``Fp8Norm``.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> Results:  # noqa: ANN401 (torch's interface)
        operands, own = Operands(*arguments[:WEIGHTS]), arguments[WEIGHTS : WEIGHTS + 1]
        hidden, weight, bias, eps, scale = arguments[WEIGHTS + 1 :]
        update = forward(ctx, operands, own).view_as(hidden)
        found = normalize_and_cast(hidden, update, NormOf(weight, bias, eps), scale, FORMATS[INPUT])
        save(ctx, operands, own, [found.hidden, found.mean, found.factor, weight])
        return results(ctx, found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, passed: Tensor, given: Tensor, *_cast: None) -> Gradients:
        kept = saved(ctx)
        hidden, mean, factor, weight = kept.more
        found, (values, transposed, amax) = normalize_backward_and_cast(
            given, passed, hidden, mean, factor, weight, kept.gradient.scale, FORMATS[GRADIENT]
        )
        product = backward(ctx, kept, Cast(values, transposed, kept.gradient.inverse, amax))
        return *product[: WEIGHTS + 1], found.hidden, *of_parameters(found, weight), None, None


def results(ctx: FunctionCtx, found: Normalized) -> Results:
    without_gradients(ctx, found.values, found.transposed, found.amax)
    stands = without_values(found.hidden, found.hidden.shape)
    return found.hidden, stands, found.values, found.transposed, found.amax


def of_parameters(found: NormGradients, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """In the dtype of the weight; fp32 with a bias."""
    return found.weight.to(weight.dtype), found.bias


class Fp8Rotated(torch.autograd.Function):
    """Rotated query and key, and value: [batch, seq, heads, head_dim] each.

    Arguments: ``Operands``, weights, ``Rotation``, head_dim, batch, and whether to rotate in place.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 (torch's interface)
        given = Operands(*arguments[:WEIGHTS])
        *weights, cos, sin, interleaved, head_dim, batch, in_place = arguments[WEIGHTS:]
        ctx.interleaved, rotation = interleaved, Rotation(cos, sin, interleaved)
        save(ctx, given, weights, [cos, sin])
        product = forward(ctx, given, weights)
        of_query, of_key, of_value = (size // head_dim for size in ctx.outputs)
        if in_place:
            rotate_in_place(product, rotation, of_query + of_key, head_dim)
        heads = product.view(batch, -1, of_query + of_key + of_value, head_dim)
        query, key, value = torch.split(heads, [of_query, of_key, of_value], -2)
        if in_place:
            return query, key, value
        return rotate(query, rotation), rotate(key, rotation), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, *gradients: Tensor) -> Gradients:
        kept = saved(ctx)
        cos, sin = kept.more
        rotation = Rotation(cos, sin, ctx.interleaved)
        scale, inverse = kept.gradient
        values, transposed, amax = cast_rotated_gradient(Heads(*gradients), rotation, scale, FORMATS[GRADIENT])
        return backward(ctx, kept, Cast(values, transposed, inverse, amax))

# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 that rotates queries and keys where their product wrote them.

Query, key and value stay parts of one tensor, and their gradients are cast while they are rotated back, without being
joined in bf16 before. For trained weights and delayed scaling: then the scales are known before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmb.engine.kernels.arguments import Heads, Rotation
from llmb.engine.kernels.rotary import cast_rotated_gradient, rotate, rotate_in_place
from llmb.engine.model.attention import Attention, RotaryPosition
from llmb.engine.model.rotary import Rotary
from llmb.engine.precision.autograd import WEIGHTS, Fp8Context, Gradients, Operands, backward, forward, save, saved
from llmb.engine.precision.linear import CastInput, Fp8Joined, operands, shape_of
from llmb.engine.precision.product import Cast
from llmb.engine.precision.scaling import FORMATS, GRADIENT
from llmb.engine.typed_autograd import apply


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


class RotatedAttention(Attention):
    """``whole``, of which only positions come between product and attention, and whose modules it takes.

    in_place: rotates where the product wrote them, instead of in new tensors; see ``apply.rotates_in_place``.
    """

    def __init__(self, whole: Attention, *, in_place: bool) -> None:
        nn.Module.__init__(self)
        assert only_rotates(whole)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj
        self.qkv = Fp8Joined(self, *whole.qkv.names)
        self.qkv_adapter, self.q_norm, self.k_norm = None, None, None
        self.head_dim, self.position, self.core = whole.head_dim, whole.position, whole.core
        self.in_place = in_place

    def rotated(self, hidden: Tensor | CastInput, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qkv, Fp8Joined)
        assert isinstance(self.position, RotaryPosition)
        batch = shape_of(hidden)[0]
        more = rotary.cos, rotary.sin, self.position.interleaved, self.head_dim, batch, self.in_place
        query, key, value = apply(Fp8Rotated, *operands(self.qkv, hidden), *more)
        return query, key, value


def only_rotates(attention: Attention) -> bool:
    return isinstance(attention.position, RotaryPosition) and attention.q_norm is None

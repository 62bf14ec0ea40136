# SPDX-License-Identifier: Apache-2.0
"""FP8 casts, fused or alone. Results: contiguous values, contiguous transpose, and the unscaled absolute maximum (0-d
fp32, NaN preserved)."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["swiglu", "squared-relu"]
"""``swiglu`` has two inputs of the same size, gate and up, side by side in one tensor."""
BothWays = tuple[Tensor, Tensor, Tensor]
ALIGNED_ROWS = 16
CAPABILITY = (8, 9)
"""The lowest compute capability of GPUs that support FP8 casts and products."""


def has_kernel(tensor: Tensor) -> bool:
    """Return True if the Triton kernels support the tensor's device; otherwise, torch code computes the results."""
    return tensor.is_cuda and _casts(tensor.device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _casts(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def largest_value(values: Tensor) -> Tensor:
    """Return the largest absolute value, 0-d fp32: NaN if any value is NaN, 0 if there are no values."""
    return values.abs().amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` times ``scale`` as ``dtype``; products beyond its range are clamped."""
    largest = torch.finfo(dtype).max
    # Casts of larger values differ between versions and devices of torch.
    return (values.float() * scale).clamp(-largest, largest).to(dtype)


def cast_both_ways(values: Tensor, scale: Tensor, dtype: torch.dtype) -> BothWays:
    """Cast a matrix, [rows, columns], or a stack of them; return both memory layouts and the largest absolute value."""
    if has_kernel(values):
        from llmb.engine.kernels import fp8_cast_triton

        casts: BothWays = fp8_cast_triton.cast_both_ways(values, scale, dtype)
        return casts
    scaled = cast(values, scale, dtype)
    return scaled, scaled.mT.contiguous(), largest_value(values)


def cast_into(source: Tensor, scale: Tensor, values: Tensor, transposed: Tensor, amax: Tensor) -> None:
    """Write the results of ``cast_both_ways`` to existing tensors, which may be slices of larger tensors."""
    if has_kernel(source):
        from llmb.engine.kernels import fp8_cast_triton

        fp8_cast_triton.cast_into(source, scale, values, transposed, amax.zero_())
        return
    scaled = cast(source, scale, values.dtype)
    values.copy_(scaled)
    transposed.copy_(scaled.mT)
    amax.copy_(largest_value(source))


def transpose(values: Tensor) -> Tensor:
    """Return the contiguous transpose of an FP8 matrix."""
    if has_kernel(values):
        # Another copy of the values is written, by rows, which takes less time than copies whose stores are scattered.
        return cast_both_ways(values, torch.ones((), device=values.device), values.dtype)[1]
    return values.mT.contiguous()


def activate(inputs: Tensor, activation: Activation) -> Tensor:
    """Apply ``activation``: map [rows, features], or [rows, 2 * features] with gate and up, to [rows, features]."""
    if activation == "squared-relu":
        return functional.relu(inputs).square()
    gate, up = inputs.chunk(2, -1)
    return functional.silu(gate) * up


def activate_backward(inputs: Tensor, gradient: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of ``activate``'s inputs from its result's ``gradient``, rounding as autograd does."""
    if activation == "squared-relu":
        positive = functional.relu(inputs)
        to_input: Tensor = torch.ops.aten.threshold_backward(gradient * (2.0 * positive), positive, 0)
        return to_input
    gate, up = inputs.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(gradient * up, gate), gradient * functional.silu(gate)), -1)


def cast_activated(inputs: Tensor, scale: Tensor, activation: Activation, dtype: torch.dtype) -> BothWays:
    """Return ``cast_both_ways`` of ``activate(inputs)``; the Triton kernel does not store the uncast activation."""
    if has_kernel(inputs):
        from llmb.engine.kernels import fp8_cast_triton

        casts: BothWays = fp8_cast_triton.cast_activated(inputs, scale, activation, dtype)
        return casts
    return cast_both_ways(activate(inputs, activation), scale, dtype)


def cast_activation_gradient(
    inputs: Tensor, gradient: Tensor, scale: Tensor, activation: Activation, dtype: torch.dtype
) -> BothWays:
    """Return ``cast_both_ways`` of ``activate_backward(inputs, gradient)``, which the Triton kernel does not store."""
    # For other numbers of rows, the assembler of CUDA 12.8, which Triton bundles, drops values, as seen on an H200.
    if inputs.shape[0] % ALIGNED_ROWS == 0 and has_kernel(inputs):
        from llmb.engine.kernels import fp8_cast_triton

        casts: BothWays = fp8_cast_triton.cast_activation_gradient(inputs, gradient, scale, activation, dtype)
        return casts
    return cast_both_ways(activate_backward(inputs, gradient, activation), scale, dtype)


class Heads(NamedTuple):
    """Query, key and value of one product, or their gradients: [batch, seq, heads, head_dim] each, with any strides."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """Rotations of pairs of elements. ``cos``, ``sin``: fp32, [seq, pairs] or [batch, seq, pairs]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    """True if a pair is elements (2i, 2i + 1), not (i, i + pairs)."""


class RotaryFactors(NamedTuple):
    """Each element times ``own``, plus the other of its pair times ``other``: fp32, [(batch,) seq, 1, 2 * pairs]."""

    own: Tensor
    other: Tensor
    interleaved: bool


def factors_of(rotation: Rotation) -> RotaryFactors:
    cos, sin = rotation.cos.unsqueeze(-2), rotation.sin.unsqueeze(-2)
    if rotation.interleaved:
        return RotaryFactors(cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2), True)
    return RotaryFactors(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), False)


def rotate(heads: Tensor, factors: RotaryFactors) -> Tensor:
    """Rotate the leading elements of each head; shape, [batch, seq, heads, head_dim], and dtype do not change."""
    size = factors.own.shape[-1]
    rotated, rest = heads[..., :size].float(), heads[..., size:]
    partners = (
        rotated.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2) if factors.interleaved else rotated.roll(size // 2, -1)
    )
    rotated = torch.addcmul(rotated * factors.own, partners, factors.other).to(heads.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def cast_rotated_gradient(gradients: Heads, rotation: Rotation, scale: Tensor, dtype: torch.dtype) -> BothWays:
    """Return ``cast_both_ways`` of ``rotated_back(gradients, rotation)``, which the Triton kernel does not store."""
    if has_kernel(gradients.query):
        from llmb.engine.kernels import rotary_triton

        casts: BothWays = rotary_triton.cast_rotated_gradient(*gradients, *rotation, scale, dtype)
        return casts
    return cast_both_ways(rotated_back(gradients, rotation), scale, dtype)


def rotated_back(gradients: Heads, rotation: Rotation) -> Tensor:
    """Return the joint product's gradient, [batch * seq, outputs]: gradients of query and key are rotated back."""
    back = factors_of(rotation._replace(sin=-rotation.sin))
    query, key = (rotate(part, back) for part in (gradients.query, gradients.key))
    joined = torch.cat((query, key, gradients.value), -2)
    return joined.flatten(0, 1).flatten(1)

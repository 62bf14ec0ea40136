# SPDX-License-Identifier: Apache-2.0
"""What kernels take and return: below both the functions that choose a kernel and the Triton modules."""

from typing import Literal, NamedTuple

from torch import Tensor

Activation = Literal["swiglu", "squared-relu"]
"""``swiglu`` has two inputs of the same size, gate and up, side by side in one tensor."""
BothWays = tuple[Tensor, Tensor, Tensor]


class Heads(NamedTuple):
    """Query, key and value, or their gradients: [batch, seq, heads, head_dim] each, with any strides."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """cos and sin: [seq, pairs] or [batch, seq, pairs], fp32.

    A pair is elements (i, i + pairs) of a head, or (2i, 2i + 1) when ``interleaved``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class RotaryFactors(NamedTuple):
    """A rotation of whole heads: each element times ``own``, plus the other of its pair times ``other``.

    [seq, 1, 2 * pairs] or [batch, seq, 1, 2 * pairs], fp32.
    """

    own: Tensor
    other: Tensor
    interleaved: bool


class AdamWNumbers(NamedTuple):
    """The numbers of one step, on the host. ``step`` is 1 for the first."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class OfParameter(NamedTuple):
    """The tensors of one parameter, contiguous. master, first, second: fp32, the two moments last.

    gradient: bf16 or fp32; the latter may be overwritten. weight: bf16, gets the rounded master; None if the master
    itself is the weight.
    """

    master: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    weight: Tensor | None


class Casts(NamedTuple):
    """What gets the weight in FP8 e4m3, [..., rows, columns], as ``fp8_cast.cast`` casts it.

    scale: the factor before the cast, 0-d fp32. transposed: [..., columns, rows]; it and ``values`` may be slices of
    larger buffers, with contiguous last dimensions. amax: 0-d fp32, gets the largest absolute value of the rounded
    master, NaN if any is NaN.
    """

    scale: Tensor
    values: Tensor
    transposed: Tensor
    amax: Tensor


def check_contiguous(tensors: OfParameter) -> None:
    """Kernels take one place for all of them: others would be updated with values of their neighbors."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.shape == tensors.master.shape for tensor in given)

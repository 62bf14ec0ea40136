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

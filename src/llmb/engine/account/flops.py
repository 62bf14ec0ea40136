# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of matrix products and attention, as they are computed: of causal attention the half.

torch counts its own products (``flop_registry``); it does not know the engine's, nor that a mask is causal.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from llmb.engine.kernels import span_attention
from llmb.engine.model.linear import add_product
from llmb.engine.precision.experts import expert_products, expert_weight_gradients

aten = torch.ops.aten
FORWARD, BACKWARD = 2, 5
"""Products of attention; the backward pass computes the scores again (Dao et al., 2022, appendix B)."""
PRECISIONS = MappingProxyType({1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"})
"""By bytes of an element."""
ATTENTION = frozenset(each._opoverload._overloadpacket for each in (span_attention.forward, span_attention.backward))


def kind_of(operator: Any, args: Sequence[Any]) -> str:  # noqa: ANN401 (whatever an operator takes)
    """``attention``, or the precision of the matrices that a product reads: the lowest."""
    packet = operator._overloadpacket
    if "attention" in str(packet) or packet in ATTENTION:
        return "attention"
    matrices = [
        each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 1
    ]
    return PRECISIONS[min(each.itemsize for each in matrices)]


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:  # noqa: ANN401 (whatever an operator takes and returns)
    """0 for operators that multiply no matrices. Those of the engine have to be known."""
    packet = operator._overloadpacket
    if own := OWN.get(packet):
        return own(*args, **kwargs)
    if operator.namespace == "llmb":
        raise NotImplementedError(f"the FLOPs of {operator} are not counted")
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))


def _grouped(rows: Tensor, matrices: Tensor, *_: object, **__: object) -> int:
    """Groups are parts of the rows, or of the dimension that is summed over."""
    return 2 * rows.numel() * matrices.shape[-1]


def _added(_total: Tensor, left: Tensor, right: Tensor, **_: object) -> int:
    return 2 * left.numel() * right.shape[-1]


def _summed(_total: Tensor, _is_empty: Tensor, gradient: Tensor, rows: Tensor) -> int:
    return 2 * gradient.numel() * rows.shape[-1]


def _experts(rows: Tensor, _inverse: Tensor, matrices: Tensor, *_: object) -> int:
    return 2 * rows.numel() * matrices.shape[1]


def _expert_gradients(rows: Tensor, _inverse: Tensor, gradients: Tensor, *_: object) -> int:
    return 2 * rows.numel() * len(gradients)


def _spans(products: int, query: Tensor, numbers: Sequence[int]) -> int:
    """query: [batch, queries, heads, head_dim]; numbers: see ``TokenSpan``."""
    batch, _, heads, head_dim = query.shape
    pairs = 0
    for start in range(0, len(numbers), 4):
        _, length, key, own_key = numbers[start : start + 4]
        pairs += length * (own_key - key) + length * (length + 1) // 2
    return 2 * products * batch * heads * head_dim * pairs


def _attention(products: int, query: Tensor, key: Tensor, *, causal: bool) -> int:
    """query: [batch, heads, queries, head_dim]."""
    queries, keys = query.shape[2], key.shape[2]
    pairs = queries * (queries + 1) // 2 if causal and queries == keys else queries * keys
    return 2 * products * query.shape[0] * query.shape[1] * query.shape[3] * pairs


OWN: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        aten._grouped_mm: _grouped,
        aten.addmm_: _added,
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, _value, _dropout=0.0, causal=False, **_: _attention(FORWARD, query, key, causal=causal)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda _gradient, query, key, _value, _seen, _lse, _dropout=0.0, causal=False, **_: _attention(
                BACKWARD, query, key, causal=causal
            )
        ),
        **{
            operator._opoverload._overloadpacket: count
            for operator, count in (
                (add_product, _summed),
                (expert_products, _experts),
                (expert_weight_gradients, _expert_gradients),
                (span_attention.forward, lambda query, _key, _value, *rest: _spans(FORWARD, query, rest[0])),
                (span_attention.backward, lambda _gradient, query, *rest: _spans(BACKWARD, query, rest[4])),
            )
        },
    }
)
"""By operator, with its arguments."""

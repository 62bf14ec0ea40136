# SPDX-License-Identifier: Apache-2.0
"""How far attention lies from exact attention: computed in fp32, query by query, with the scores of all pairs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmb.engine.model.attention import attend, between

NAMES = ("result", "gradient of queries", "gradient of keys", "gradient of values")
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 0.001}
"""The largest distance, relative to the exact values' norm. In bf16 rounding takes 0.003 of it."""
MOST_SCORES = 2**26
"""How many are in memory at a time: in fp32, with their gradients, 1 GiB."""


def exact_attention(heads: Sequence[Tensor], gradient: Tensor, first_keys: Tensor, last_keys: Tensor) -> list[Tensor]:
    """The result and the gradients of query, key and value: [batch, queries or keys, heads, head_dim] fp32.

    gradient: of the result. first_keys, last_keys: what each query attends to, [batch or 1, queries].
    """
    query, key, value, gradient = (part.detach().float() for part in (*heads, gradient))
    batch, queries, number, _ = query.shape
    rows = max(1, MOST_SCORES // (batch * number * key.shape[1]))
    leaves = key.requires_grad_(), value.requires_grad_()
    found: list[tuple[Tensor, ...]] = []
    to_key, to_value = torch.zeros_like(key), torch.zeros_like(value)
    with sdpa_kernel(SDPBackend.MATH):
        for start in range(0, queries, rows):
            own = slice(start, start + rows)
            part = query[:, own].requires_grad_()
            mask = between(first_keys[:, own], last_keys[:, own], key.shape[1])
            seen = attend(part, *leaves, mask=mask)
            to_part, *of_keys = torch.autograd.grad(seen, (part, *leaves), gradient[:, own])
            found.append((seen.detach(), to_part))
            to_key += of_keys[0]
            to_value += of_keys[1]
    result, to_query = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return [result, to_query, to_key, to_value]


def accuracy_problem(found: Sequence[Tensor], exact: Sequence[Tensor]) -> str | None:
    """What is wrong with a kernel's result and gradients; None if they are exact up to rounding."""
    for name, one, other in zip(NAMES, found, exact, strict=True):
        bound = BOUNDS[one.dtype]
        distance = float((one.float() - other).norm() / other.norm())
        if not math.isfinite(distance):
            return f"its {name} is not finite"
        if distance > bound:
            return f"its {name} differs by {100 * distance:.2g} % from exact attention, {100 * bound:g} % are allowed"
    return None

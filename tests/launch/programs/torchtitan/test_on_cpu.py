# SPDX-License-Identifier: Apache-2.0
"""The attention that replaces torchtitan's on CPUs, against a softmax with the sinks as further scores."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from llmb.launch.programs.torchtitan.on_cpu import attend


@pytest.mark.parametrize("window", [5, 64], ids=["window", "all"])
def test_attention_honours_window_and_sinks_in_both_passes(window: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 16, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 16, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(lambda _b, _h, q, k: (k <= q) & (q - k < window), None, None, 16, 16, device="cpu")

    found = attend(query, key, value, block_mask=mask, scale=0.3, enable_gqa=True, return_lse=True)
    assert isinstance(found, tuple)
    result = found[0] * torch.sigmoid(found[1] - sinks.view(1, -1, 1)).unsqueeze(-1)  # as gpt-oss applies them

    places = torch.arange(16)
    apart = places.view(-1, 1) - places
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, dim=1)) * 0.3
    scores = scores.masked_fill((apart < 0) | (apart >= window), -math.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, -1, 16, 1)], dim=-1)
    expected = scores.softmax(dim=-1)[..., :-1] @ value.repeat_interleave(2, dim=1)

    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    inputs = (query, key, value, sinks)
    weights = torch.randn_like(result)
    for ours, theirs in zip(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Rotation by Triton kernels against torch's, in Triton's interpreter; run by ``test_kernels_interpreted.py``."""

import math

import pytest
import torch

from llmb.engine.kernels import elementwise, rotary_triton
from llmb.engine.kernels.elementwise import BothWays, Heads, Rotation

E5M2 = torch.float8_e5m2
SCALE = torch.tensor(3.7)
WORST = {"zeros and an infinity": (0.0, -math.inf, 0.0), "NaN": (math.nan, 0.0, math.nan)}
"""Of the first, middle and last element."""
CASES = {
    "whole heads": (2, 70, (4, 2, 2), 16, 8),
    "half of each head": (2, 70, (3, 1, 1), 16, 4),
    "three quarters of a tile": (1, 33, (2, 1, 1), 192, 48),
    "a quarter of each head": (1, 40, (2, 1, 1), 256, 32),
    "one row": (1, 1, (4, 2, 2), 128, 64),
    "one position": (130, 1, (1, 1, 1), 32, 16),
    "odd sizes": (3, 23, (3, 1, 1), 10, 3),
    "more pairs than a tile has columns": (1, 5, (1, 1, 1), 256, 80),
    "nothing": (0, 4, (2, 1, 1), 16, 8),
}
"""Batch, positions, heads, head_dim and pairs."""
BY_SEQUENCE = ("half of each head", "one position", "odd sizes", "nothing")
"""Each sequence has its own positions."""


@pytest.fixture(autouse=True)
def without_capture(monkeypatch):
    """The interpreter takes a kernel as it is."""
    monkeypatch.setattr(rotary_triton, "wrap_triton", lambda kernel: kernel)


def random(*shape):
    """Of all magnitudes, so that some are saturated, some subnormal and some zero after the cast."""
    return (torch.randn(shape) * 10 ** (8 * torch.rand(shape) - 6)).bfloat16()


def rotation_of(batch, seq, pairs, *, by_sequence, interleaved=False):
    angles = torch.randn(*((batch, seq) if by_sequence else (seq,)), pairs)
    return Rotation(angles.cos(), angles.sin(), interleaved)


def with_worst(values, worst):
    for place, value in zip((0, values.numel() // 2, -1), WORST[worst] if values.numel() else (), strict=False):
        values.view(-1)[place] = value
    return values


def assert_equal(found: BothWays, expected: BothWays) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)])
def test_gradients_are_rotated_back_and_cast_as_if_they_were_stored(number, case, worst):
    interleaved = (number + list(WORST).index(worst)) % 2 == 1
    batch, seq, heads, head_dim, pairs = CASES[case]
    torch.manual_seed(3)
    gradients = Heads(*(with_worst(random(batch, seq, number, head_dim), worst) for number in heads))
    rotation = rotation_of(batch, seq, pairs, by_sequence=case in BY_SEQUENCE, interleaved=interleaved)
    expected = elementwise.cast_rotated_gradient(gradients, rotation, SCALE, E5M2)
    assert_equal(rotary_triton.cast_rotated_gradient._init_fn(*gradients, *rotation, SCALE, E5M2), expected)


ORDERS = {
    "heads before positions": lambda part: part.transpose(1, 2).contiguous().transpose(1, 2),
    "positions before sequences": lambda part: part.transpose(0, 1).contiguous().transpose(0, 1),
    "beside others": lambda part: torch.cat((part, part), -1)[..., : part.shape[-1]],
    "at odd places": lambda part: torch.nn.functional.pad(part, (1, 2))[..., 1:-2],
    "from an odd place on": lambda part: torch.cat((part.new_zeros(1), part.flatten()))[1:].view(part.shape),
    "elements of a head apart": lambda part: part.transpose(2, 3).contiguous().transpose(2, 3),
    "the same for all": lambda part: part[:1, :, :1].expand_as(part),
}


@pytest.mark.parametrize("first", range(len(ORDERS)))
def test_gradients_in_any_order_in_memory(first):
    """Each has strides of its own, and each order is in each place once."""
    batch, seq, heads, head_dim, pairs = CASES["odd sizes"]
    orders = [list(ORDERS.values())[(first + place) % len(ORDERS)] for place in range(3)]
    mixed = Heads(*(order(random(batch, seq, number, head_dim)) for order, number in zip(orders, heads, strict=True)))
    rotation = rotation_of(batch, seq, pairs, by_sequence=True, interleaved=first % 2 == 1)
    expected = elementwise.cast_rotated_gradient(mixed, rotation, SCALE, E5M2)
    assert_equal(rotary_triton.cast_rotated_gradient._init_fn(*mixed, *rotation, SCALE, E5M2), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_pairs_are_loaded_from_even_places(order):
    """The interpreter loads both elements from anywhere, a GPU does not."""
    part = rotary_triton._heads_of_pairs(ORDERS[order](random(2, 3, 4, 16)))
    assert part.stride(-1) == 1
    assert not any(place % 2 for place in (part.storage_offset(), *part.stride()[:3]))


def test_zeros_have_no_largest_value():
    parts = Heads(*(torch.zeros(1, 4, 2, 8).bfloat16() for _ in range(3)))
    rotation = rotation_of(1, 4, 4, by_sequence=False)
    assert rotary_triton.cast_rotated_gradient._init_fn(*parts, *rotation, SCALE, E5M2)[2] == 0

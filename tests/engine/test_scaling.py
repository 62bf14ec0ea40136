# SPDX-License-Identifier: Apache-2.0
"""FP8 scales are those of the rule, bit by bit, whatever values tensors held."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmb.engine.precision.apply import weight_amax
from llmb.engine.precision.scaling import GRADIENT, INPUT, LARGEST, WEIGHT, Scales, scale_from

AMAX = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, 2.0**-149, 2.0**-126, 448.0, 464.0, 2.0**127]),
    st.floats(min_value=0.0, max_value=2.0**127, width=32),
)
STEPS = st.lists(st.tuples(AMAX, AMAX, AMAX), min_size=1, max_size=12)
LARGEST_FP32 = float(np.finfo(np.float32).max)


def delayed_scale(seen: list[float], largest: float, before: float) -> float:
    """The rule in fp64, for the values of the steps that the history holds."""
    if not all(math.isfinite(amax) for amax in seen) or max(seen) == 0.0:
        return before
    return float(np.float32(min(largest / max(seen), LARGEST_FP32)))


def make_scales(length: int, *, delayed: bool = True) -> Scales:
    return Scales(1, torch.device("cpu"), None, delayed=delayed, length=length)


@given(steps=STEPS, length=st.integers(min_value=1, max_value=5))
def test_delayed_scales_are_those_of_the_rule(steps: list[tuple[float, float, float]], length: int) -> None:
    scales = make_scales(length)
    expected = [1.0, 1.0, 1.0]
    for number in range(len(steps)):
        scales.amax.copy_(torch.tensor(steps[number]))
        scales.finish(number)
        latest = steps[max(0, number - length + 1) : number + 1]
        seen = [[step[which] for step in latest] for which in (INPUT, WEIGHT, GRADIENT)]
        expected = [delayed_scale(*values) for values in zip(seen, LARGEST, expected, strict=True)]
        assert scales.scale[0].tolist() == expected
        assert not scales.amax.any()


def test_the_history_is_as_long_as_the_recipes_and_forgets() -> None:
    scales = Scales(1, torch.device("cpu"), None, delayed=True)
    values = [4.0, *[1.0] * 1024]
    found = []
    for number, value in enumerate(values):
        scales.amax.fill_(value)
        scales.finish(number)
        found.append(scales.scale[0, INPUT].item())
    assert found == [112.0] * 1024 + [448.0]


def test_what_does_not_fit_is_counted() -> None:
    scales = make_scales(4)
    # Half a step above the largest value is where rounding would leave the format.
    for amax, counts in [
        ((464.0, 464.5, 61440.0), (1, 0)),
        ((464.5 / 448 * 464.5, 1.0, math.inf), (1, 1)),
        ((math.nan, 1.0, 1e9), (1, 1)),
    ]:
        scales.amax.copy_(torch.tensor(amax))
        scales.finish(0)
        assert tuple(scales.counts.tolist()) == counts, amax


def test_current_scales_of_nothing_and_of_no_number_are_one() -> None:
    amax = torch.tensor([0.0, math.inf, math.nan, 7.0, 2.0**-149])
    assert scale_from(amax, 448.0, 1.0).tolist() == [1.0, 1.0, 1.0, 64.0, LARGEST_FP32]


@pytest.mark.parametrize("size", [0, 5])
def test_weights_count_as_they_are_multiplied(size: int) -> None:
    weights = [torch.tensor([[0.3, -1.001]]), torch.linspace(-1, 0.9, 5)[:size]]
    amax = weight_amax(weights)
    assert amax.dtype is torch.float32
    assert amax.tolist() == [1.0, 1.0 if size else 0.0]


@pytest.mark.parametrize("delayed", [True, False])
def test_scales_of_frozen_weights_are_final_from_the_first_step(delayed: bool) -> None:
    scales = make_scales(4, delayed=delayed)
    scales.freeze_weights(torch.tensor([2.0]))
    for number in range(6):
        assert scales.scale[0, WEIGHT].item() == 224.0
        scales.amax[:, WEIGHT] = scales.frozen_weights
        scales.amax[:, INPUT] = 7.0
        scales.finish(number)
    assert scales.scale[0, INPUT].item() == (64.0 if delayed else 1.0)


def test_a_scale_is_the_same_from_one_largest_value_and_from_a_history() -> None:
    """So frozen weights have one scale before and after the first step, and in resumed runs."""
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(scale_from(amax, LARGEST[WEIGHT], 1.0), scale_from(amax, torch.tensor(LARGEST[WEIGHT]), 1.0))


def test_layers_that_share_scales_have_those_of_their_largest_values() -> None:
    scales = Scales(4, torch.device("cpu"), None, delayed=True, length=2, leaders=[0, 1, 0, 0])
    scales.amax.copy_(torch.tensor([[4.0, 1, 0], [2, 2, 2], [0, 7, 3], [0, 5, math.inf]]))
    scales.finish(0)
    assert scales.scale[[0, 2, 3]].tolist() == [[112.0, 64.0, 1.0]] * 3
    assert scales.scale[1].tolist() == [224.0, 224.0, 28672.0]
    assert scales.counts.tolist() == [0, 1]
    scales.amax.fill_(1e4)
    scales.finish(1)
    assert scales.counts.tolist() == [5, 0]  # all but one gradient


def test_current_and_frozen_scales_of_weights_are_shared_too() -> None:
    for freezes in (False, True):
        scales = Scales(2, torch.device("cpu"), None, delayed=freezes, length=2, leaders=[0, 0])
        (scales.freeze_weights if freezes else scales.set_weights)(torch.tensor([2.0, 7.0]))
        assert scales.scale[:, WEIGHT].tolist() == [64.0, 64.0]


def test_factors_are_those_of_the_scales_at_aligned_addresses() -> None:
    scales = make_scales(4)
    scales.scale.copy_(torch.tensor([[4.0, 0.5, 10.0]]))
    factors = scales.of_layer(0)
    scales.use()
    assert [(own.scale.item(), own.inverse.item()) for own in factors] == [
        (4.0, 0.25),
        (0.5, 2.0),
        (10.0, 1 / np.float32(10)),
    ]
    assert all(part.data_ptr() % 16 == scales.factors.data_ptr() % 16 for own in factors for part in own)

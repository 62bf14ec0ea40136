# SPDX-License-Identifier: Apache-2.0
"""Rotation by position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmb.engine.kernels.elementwise import rotate
from llmb.engine.model.attention import frequencies, rotary_tables

PAIRS = {False: "halves", True: "interleaved"}


@pytest.mark.parametrize("interleaved", [False, True])
@given(query_at=st.integers(0, 10_000), key_at=st.integers(0, 10_000), shift=st.integers(0, 10_000))
def test_scores_depend_on_distance_alone(models, interleaved, query_at, key_at, shift):
    model = models["nemotron4"].model_copy(update={"rotary_pairs": PAIRS[interleaved]})
    query, key = torch.randn(2, 1, 1, 1, model.head_dim, generator=torch.Generator().manual_seed(0))

    def score(moved: int) -> float:
        tables = [rotary_tables(model, torch.tensor([at + moved])) for at in (query_at, key_at)]
        pair = [rotate(heads, rotary.factors) for heads, rotary in zip((query, key), tables, strict=True)]
        return float((pair[0] * pair[1]).sum())

    assert score(shift) == pytest.approx(score(0), abs=2e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_rotary_fraction_of_a_head_turns(models, interleaved):
    heads = torch.randn(1, 8, 2, 16)
    model = models["nemotron4"].model_copy(update={"rotary_pairs": PAIRS[interleaved]})
    turned = rotate(heads, rotary_tables(model, torch.arange(8)).factors)
    assert torch.equal(turned[..., 8:], heads[..., 8:])
    assert torch.equal(turned[:, 0], heads[:, 0])
    assert not torch.allclose(turned[:, 1:, :, :8], heads[:, 1:, :, :8], atol=1e-2)


def test_scaling_keeps_fast_frequencies_divides_slow_ones_and_blends_between(models):
    device = torch.device("cpu")
    plain, scaled = frequencies(models["llama"], device), frequencies(models["llama-scaled"], device)
    wavelength, ratio = 2 * torch.pi / plain, plain / scaled
    torch.testing.assert_close(ratio[wavelength < 64], torch.ones(3))
    torch.testing.assert_close(ratio[wavelength > 256], torch.full((4,), 8.0))
    between = ratio[(wavelength > 64) & (wavelength < 256)]
    assert 1 < float(between) < 8
    # Llama 3.1's formula at the one wavelength between, 198.7: share (256 / 198.7 - 1) / 3 of the frequency is kept.
    share = (256 / float(wavelength[3]) - 1) / 3
    assert float(between) == pytest.approx(1 / (share + (1 - share) / 8), rel=1e-5)

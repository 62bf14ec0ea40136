# SPDX-License-Identifier: Apache-2.0
"""Every layout trains on the same samples."""

import pytest
import torch

from llmb.catalogue.records import Layout
from llmb.engine.data.batches import rank_samples
from llmb.engine.data.build import SyntheticData


def data(seed: int = 1, distribution: str = "uniform") -> SyntheticData:
    return SyntheticData(vocab_size=1000, seq_len=32, seed=seed, distribution=distribution)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("mbs", [1, 2])
def test_a_step_sees_its_own_samples_whatever_the_layout(gpus: int, mbs: int) -> None:
    layout = Layout(gpus=gpus, mbs=mbs, gbs=16, seq_len=32, layers=1)
    source = data()
    seen = [
        row
        for rank in range(gpus)
        for numbers in rank_samples(layout, 3 * 16, rank)
        for row in source.micro_batch(numbers).tokens
    ]
    expected = [source.sample(number)[:-1] for number in range(3 * 16, 4 * 16)]
    assert sorted(row.tolist() for row in seen) == sorted(row.tolist() for row in expected)


def test_labels_are_the_tokens_shifted_by_one() -> None:
    tokens, labels, starts, *_ = data().micro_batch(range(2))
    assert starts is None
    assert tokens.shape == labels.shape == (2, 32)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_samples_depend_on_seed_and_number() -> None:
    assert torch.equal(data(1).sample(5), data(1).sample(5))
    assert not torch.equal(data(1).sample(5), data(2).sample(5))
    assert not torch.equal(data(1).sample(5), data(1).sample(6))


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_tokens_lie_in_the_vocabulary(distribution: str) -> None:
    tokens = torch.cat([data(distribution=distribution).sample(number) for number in range(500)])
    assert tokens.min() == 0
    assert 900 < tokens.max() <= 999


def test_zipf_makes_frequent_tokens_frequent() -> None:
    """The share of the first token is ln 2 / ln(V + 1) for frequencies of 1/k taken as continuous."""
    tokens = torch.cat([data(distribution="zipf").sample(number) for number in range(500)])
    share = (tokens == 0).double().mean().item()
    assert share == pytest.approx(0.6931 / 6.9088, abs=0.01)

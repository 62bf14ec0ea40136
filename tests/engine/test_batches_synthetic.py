# SPDX-License-Identifier: Apache-2.0
"""Every layout trains on the same samples, however sequences are shared out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmb.catalogue.records import Layout
from llmb.engine.data.batches import rank_samples
from llmb.engine.data.build import SyntheticData
from llmb.engine.parallel.context_parallel import rank_positions, spans


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


CPU = torch.device("cpu")


@given(ranks=st.integers(1, 16), size=st.integers(1, 8))
def test_every_position_has_one_rank_and_all_ranks_see_equally_many_keys(ranks: int, size: int) -> None:
    seq_len = 2 * ranks * size
    positions = [rank_positions(seq_len, rank, ranks, CPU) for rank in range(ranks)]
    assert torch.cat(positions).sort().values.tolist() == list(range(seq_len))
    assert len({int((part + 1).sum()) for part in positions}) == 1


@given(first=st.integers(0, 100), length=st.integers(1, 100), chunk_size=st.none() | st.integers(1, 50))
def test_spans_cover_the_queries_in_order_and_begin_to_see_where_their_chunk_begins(
    first: int, length: int, chunk_size: int | None
) -> None:
    found = spans(range(first, first + length), 7, chunk_size)
    queries = [(span.own_key + index, span.key) for span in found for index in range(span.length)]
    expected = [
        (query, query // chunk_size * chunk_size if chunk_size else 0) for query in range(first, first + length)
    ]
    assert queries == expected
    assert [span.query + index for span in found for index in range(span.length)] == list(range(7, 7 + length))


@pytest.mark.parametrize(("chunk_size", "count"), [(None, 1), (64, 1), (16, 3)])
def test_no_more_spans_than_chunks(chunk_size: int | None, count: int) -> None:
    assert len(spans(range(24, 56), 0, chunk_size)) == count

# SPDX-License-Identifier: Apache-2.0
"""How sequences are shared out over context-parallel ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmb.engine.parallel.context_parallel import rank_positions, spans

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

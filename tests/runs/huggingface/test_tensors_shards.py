# SPDX-License-Identifier: Apache-2.0
"""Tensors are spread over files in their order, and no file is too large."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.runs.huggingface.tensors import index_document, parse_size, plan_shards, shard_files


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_files_hold_everything_in_order_and_only_single_tensors_are_too_large(sizes: list[int], largest: int) -> None:
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    shards = plan_shards(named, largest)
    assert [name for shard in shards for name in shard] == list(named)
    for shard, after in zip(shards, [*shards[1:], None], strict=True):
        total = sum(named[name] for name in shard)
        assert total <= largest or len(shard) == 1
        assert after is None or total + named[after[0]] > largest


def test_one_file_has_the_short_name_and_the_index_says_where_each_tensor_is() -> None:
    assert shard_files(1) == ["model.safetensors"]
    assert index_document([["a", "b"], ["c"]], 14) == {
        "metadata": {"total_size": 14},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("12B", 12), ("2TB", 2e12)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0GB", "0.1B", "5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)

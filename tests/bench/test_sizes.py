# SPDX-License-Identifier: Apache-2.0
"""Sizes have units of powers of two or of ten, as they say."""

import pytest

from llmb.bench.device_bench import bytes_of
from llmb.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("8B", 8), ("64KiB", 65_536), ("64kb", 64_000), ("1.5 GiB", 3 * 2**29), ("16GiB", 2**34), ("1TB", 10**12)],
)
def test_sizes(text, size) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "5", "GiB", "-1GB", "0GB", "0.1B", "5iB", "5G", "5 Gi B"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        bytes_of(text)

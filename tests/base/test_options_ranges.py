# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.options import Span, numbers_of, parse_ranges


def test_numbers_and_ranges_are_read() -> None:
    assert parse_ranges("0-3,7,007-9") == (Span(0, 3), Span(7, 7), Span(7, 9, 1, 3))
    assert numbers_of(parse_ranges("0-3,7,0-8:4")) == (0, 1, 2, 3, 7, 0, 4, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (text, "is not a number or a range")
            for text in ("", "1,", "-1", "1-", "a", "1-2-3", " 1", "1:2", "1-9:0", "٣")
        ),
        ("4-2", "'4-2' ends before it begins"),
    ],
)
def test_what_names_no_numbers_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_ranges(text)


def test_a_long_range_is_not_spelled_out() -> None:
    (span,) = parse_ranges("0-999999999")
    assert len(span.numbers) == 10**9


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 50)), min_size=1))
def test_what_is_written_is_read(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" for first, more in ranges)
    assert numbers_of(parse_ranges(text)) == tuple(n for first, more in ranges for n in range(first, first + more + 1))

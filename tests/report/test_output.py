# SPDX-License-Identifier: Apache-2.0
"""JSON as it is printed."""

import json
import math
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.report.output import json_text


class Color(StrEnum):
    RED = "r\u00e9d"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES | st.just(Color.RED),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(DOCUMENTS)
def test_a_document_is_read_as_it_was(document):
    assert json.loads(json_text(document)) == json.loads(json.dumps(document))


def test_a_document_is_indented_and_ascii():
    document = {"%s": 1, "100 %": {"%%": []}, 3: {"a": {}, "b": (0.5, None, True)}, "\u00e9": "\n NaN \U0001f600"}
    assert json_text(document) == json.dumps(document, indent=2)


def test_half_of_a_surrogate_pair_is_escaped():
    assert json_text({"a": "\udc80"}) == json.dumps({"a": "\udc80"}, indent=2)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_number_that_is_not_finite(number):
    for document in (number, [number], {"a": number}):
        with pytest.raises(ValueError, match=r"finite|compliant"):
            json_text(document)

# SPDX-License-Identifier: Apache-2.0
"""JSON as it is printed."""

import json
import math
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.report.output import JsonText, json_text


class Color(StrEnum):
    RED = "r\u00e9d"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES | st.just(Color.RED),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
)


@given(DOCUMENTS)
def test_a_document_is_written_as_by_json(document):
    assert json_text(document) == json.dumps(document, indent=2)


def test_keys_may_have_percent_signs_and_be_numbers():
    document = {"%s": 1, "100 %": {"%%": []}, 3: {"a": {}}}
    assert json_text(document) == json.dumps(document, indent=2)


def test_text_that_is_json_already_is_kept():
    part = {"a": [1, {"b": None}]}
    document = {"results": [part, JsonText(json_text(part, "\n    "))]}
    assert json_text(document) == json.dumps({"results": [part, part]}, indent=2)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_number_that_is_not_finite(number):
    for document in (number, [number], {"a": number}):
        with pytest.raises(ValueError, match=r"finite|compliant"):
            json_text(document)

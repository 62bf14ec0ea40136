# SPDX-License-Identifier: Apache-2.0
"""A workload and a size in one word."""

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.errors import UsageError

CATALOGUE = Catalogue()


@pytest.mark.parametrize(
    ("name", "size"), [("pretrain_llama3.1_8b", None), ("pretrain_llama3.1_8b", "8b"), ("pretrain_llama3.1", "8b")]
)
def test_a_size_is_given_in_the_name_or_by_itself(name: str, size: str | None) -> None:
    assert model_of(CATALOGUE, name, size) == ("pretrain_llama3.1", "8b")


@pytest.mark.parametrize(
    ("name", "size", "what", "choices"),
    [
        ("pretrain_llama3.1", None, "the size of pretrain_llama3.1 is not specified", ("8b", "70b", "405b", "tiny")),
        ("pretrain_llama3.1_8b", "70b", "'pretrain_llama3.1_8b' has size 8b, but --size is 70b", ()),
        ("pretrain_llama3.1_9b", None, "unknown size of pretrain_llama3.1 '9b'", ("8b", "70b", "405b", "tiny")),
    ],
)
def test_two_sizes_and_none_are_errors(name: str, size: str | None, what: str, choices: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        model_of(CATALOGUE, name, size)
    assert caught.value.what.startswith(what)
    assert tuple(caught.value.choices) == choices


def test_a_misspelled_name_has_the_closest_one() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'pretrain_llama3\.1_8b'"):
        model_of(CATALOGUE, "pretrain_lama3.1_8b", None)

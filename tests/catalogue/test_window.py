# SPDX-License-Identifier: Apache-2.0
"""Window rules: which steps they give, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.window import check_rule, resolve_window


@pytest.mark.parametrize(
    ("rule", "steps", "first", "last"),
    [
        ("reference", 50, 35, 44),
        ("reference", 100, 70, 89),
        ("reference", 20, 14, 17),
        ("reference", 1000, 700, 899),
        ("reference", 1, 0, 0),
        ("reference", 2, 1, 1),
        ("reference", 3, 2, 2),
        ("auto", 50, 35, 44),
        ("auto", 1, 0, 0),
        ("last", 50, 49, 49),
        ("all", 50, 0, 49),
        ("35-44", 50, 35, 44),
        ("0-0", 1, 0, 0),
        ("11-44", 45, 11, 44),
    ],
)
def test_rules(rule, steps, first, last):
    window = resolve_window(rule, steps)
    assert (window.first, window.last, window.rule) == (first, last, rule)


@given(st.sampled_from(["reference", "auto", "last", "all"]), st.integers(min_value=1, max_value=10**9))
def test_every_run_has_a_window_inside_it(rule, steps):
    window = resolve_window(rule, steps)
    assert 0 <= window.first <= window.last < steps


@given(
    st.sampled_from(["reference", "auto", "last", "all"]),
    st.integers(min_value=1, max_value=10**6),
    st.integers(min_value=0, max_value=10**6),
)
def test_a_run_that_goes_on_has_the_window_of_a_new_one_moved(rule, steps, first_step):
    new, moved = resolve_window(rule, steps), resolve_window(rule, steps, first_step)
    assert (moved.first, moved.last) == (new.first + first_step, new.last + first_step)


def test_a_window_is_given_in_the_numbers_of_the_whole_training():
    assert resolve_window("55-58", 10, 50).first == 55
    with pytest.raises(UsageError, match="window 5-8 is outside the run, whose 10 steps are numbered 50-59"):
        resolve_window("5-8", 10, 50)


@pytest.mark.parametrize(
    "rule", ["", "A-B", "5", "5-", "-5", "44-35", "1-2-3", "1.5-3", " 1-2", "Auto", "\u0661-\u0662"]
)
def test_a_malformed_rule_is_refused(rule):
    with pytest.raises(UsageError) as refused:
        check_rule(rule)
    assert "reference, auto, last, all, A-B" in str(refused.value)
    with pytest.raises(UsageError):
        resolve_window(rule, 50)


def test_a_window_outside_the_run_is_refused():
    with pytest.raises(UsageError, match="window 35-44 is outside the run, whose 44 steps are numbered 0-43"):
        resolve_window("35-44", 44)


def test_a_run_without_steps_has_no_window():
    with pytest.raises(ValueError, match="at least one step"):
        resolve_window("reference", 0)


@pytest.mark.parametrize(
    ("documented", "steps", "first_step", "first", "last"),
    [
        ("35-44", 50, 0, 35, 44),
        ("11-44", 50, 0, 11, 44),
        ("11-44", 50, 200, 211, 244),
        ("11-44", 100, 0, 70, 89),
        ("11-44", 45, 0, 31, 39),
        ("last", 50, 0, 35, 44),
        (None, 50, 0, 35, 44),
    ],
)
def test_the_reference_window_is_that_of_the_document(documented, steps, first_step, first, last):
    window = resolve_window("reference", steps, first_step, documented)
    assert (window.first, window.last, window.rule) == (first, last, "reference")


def test_a_documented_window_changes_no_other_rule():
    for rule in ("auto", "last", "all", "3-7"):
        assert resolve_window(rule, 50, 0, "11-44") == resolve_window(rule, 50)


def test_every_document_of_the_catalogue_has_a_window_that_its_runs_have():
    windows = {document.document: document.window for document in Catalogue().documents.values()}
    assert windows["llama4-25.07"] == "11-44"
    for window in windows.values():
        resolve_window("reference", 50, 0, window)

# SPDX-License-Identifier: Apache-2.0
"""What differs between a run and its reference, and what that means."""

from itertools import product
from typing import get_args

import pytest

from llmb.runs.conditions import (
    condition_rules,
    condition_values,
    differing,
    find_conditions,
    merged,
    rule_of,
    title_of,
)
from llmb.runs.result import ReferenceKind

KINDS = get_args(ReferenceKind)
SAME = {"workload": "w", "layout.gpus": "8", "seed": "1"}


def effects(own: dict[str, str], reference: dict[str, str], kind: ReferenceKind = "baseline") -> dict[str, str]:
    return {one.key: one.effect for one in find_conditions(SAME | own, SAME | reference, kind)}


def test_every_rule_has_an_effect_on_every_kind_of_reference_and_says_why() -> None:
    for rule, kind, known in product(condition_rules(), KINDS, (True, False)):
        assert rule.effect(kind, both=known) in (None, "prevents", "weakens", "noted")
        assert rule.why
    assert rule_of("anything.else").effect("baseline", both=True) == "noted"


def test_no_rule_is_hidden_by_an_earlier_one() -> None:
    for rule in condition_rules():
        assert rule in [rule_of(key.replace("*", "x")) for key in rule.keys]


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("workload", "prevents"),
        ("dtype", "prevents"),
        ("layout.gpus", "prevents"),
        ("layout.layers", "prevents"),
        ("layout.tp", "weakens"),
        ("window", "weakens"),
        ("data", "weakens"),
        ("force_load_balancing", "weakens"),
        ("nodes", "weakens"),
        ("release", "weakens"),
        ("software.driver", "noted"),
        ("hardware.power_limit_w", "noted"),
        ("compiled", "noted"),
        ("convention", "noted"),
    ],
)
def test_what_differs_between_runs(key: str, effect: str) -> None:
    assert effects({key: "a"}, {key: "b"}) == {key: effect}
    assert effects({key: "a"}, {key: "a"}) == {}


def test_what_never_matters_is_no_condition() -> None:
    assert effects({"seed": "1", "label": "before"}, {"seed": "2", "label": "after"}) == {}


def test_a_gpu_variant_prevents_a_verdict_against_a_published_figure_only() -> None:
    own, reference = {"hardware.device": "NVIDIA H100 PCIe"}, {"hardware.device": "NVIDIA H100 SXM 80 GB"}
    assert effects(own, reference, "published") == {"hardware.device": "prevents"}
    assert effects(own, reference, "baseline") == {"hardware.device": "weakens"}


def test_what_only_one_side_tells_is_a_condition_where_it_matters() -> None:
    assert effects({"dtype": "bf16"}, {}) == {"dtype": "weakens"}
    assert effects({"software.driver": "580.1", "compiled": "yes"}, {}) == {}
    (condition,) = find_conditions({}, {"errata": "a bad run was published"}, "published")
    assert (condition.own, condition.reference, condition.effect) == (None, "a bad run was published", "noted")


def test_the_most_important_condition_is_first() -> None:
    own = {"software.torch": "2.12", "window": "1-2", "dtype": "fp8", "nodes": "a"}
    reference = {"software.torch": "2.13", "window": "last", "dtype": "bf16", "nodes": "b"}
    assert list(effects(own, reference)) == ["dtype", "nodes", "window", "software.torch"]


def test_values_are_texts_and_what_is_unknown_is_missing() -> None:
    known = {"a": True, "b": None, "c": 989.0, "d": 8, "e": "x", "f": False}
    assert condition_values(known) == {"a": "yes", "c": "989", "d": "8", "e": "x", "f": "no"}
    assert condition_values({"lora": None}, unset="none") == {"lora": "none"}


def test_values_of_several_runs_are_those_of_all() -> None:
    sides = [{"a": "1", "b": "x", "c": "z"}, {"a": "1", "b": "y"}]
    assert merged(sides) == {"a": "1", "b": "x, y"}
    assert merged([]) == {}


def test_titles_are_for_people_and_exact() -> None:
    assert title_of("layout.gpus") == "number of GPUs"
    assert title_of("layout.tp") == "layout.tp"
    conditions = find_conditions(
        {"data": "a", "program": "x", "layout.tp": "1"}, {"data": "b", "program": "y"}, "baseline"
    )
    assert differing(conditions) == "data and program differ"


@pytest.mark.parametrize(
    ("key", "text"), [("nodes", "node list differs"), ("layout.layers", "number of layers differs")]
)
def test_one_title_is_singular(key: str, text: str) -> None:
    assert differing(find_conditions({key: "1"}, {key: "2"}, "baseline")) == text

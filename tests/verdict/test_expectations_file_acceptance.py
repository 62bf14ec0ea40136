# SPDX-License-Identifier: Apache-2.0
"""Acceptance sets and the catalogue; the pages on verdicts have the values of the data files."""

from collections import defaultdict
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.cli.main import load_command
from llmb.runs.conditions import ConditionRule, condition_rules
from llmb.verdict.expectations_file import acceptance_sets, find_acceptance_set
from llmb.verdict.judgement import default_tolerance


@pytest.mark.parametrize("name", acceptance_sets())
def test_every_recipe_of_a_set_has_a_published_step_time(name: str) -> None:
    wanted = acceptance_sets()[name]
    catalogue = Catalogue()
    for one in wanted.recipes:
        request = Request(
            workload=one.workload, size=one.size, dtype=one.dtype, scale=one.scale, gpu_type=wanted.gpu_type
        )
        recipe = resolve(catalogue, request)
        assert recipe.expectations and recipe.expectations[0].step_time_s, one
        assert not recipe.proxy
    assert len(set(wanted.recipes)) == len(wanted.recipes)


def test_a_set_passes_at_its_part_of_the_throughput() -> None:
    wanted = find_acceptance_set("h100")
    assert {recipe.scale for recipe in wanted.recipes} == {512}
    assert (wanted.pass_at_pct, wanted.valid_months) == (95, 12)
    assert wanted.tolerance.pct == pytest.approx(100 * (1 / 0.95 - 1))
    assert wanted.tolerance.source == "acceptance set h100: 95 % of the published throughput"


def test_an_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100'") as caught:
        find_acceptance_set("h10")
    assert set(caught.value.choices) == set(acceptance_sets())


def test_the_help_names_every_set() -> None:
    (option,) = [item for item in load_command("judge").params if "--acceptance" in item.opts]
    assert option.help.endswith(f": {', '.join(acceptance_sets())}.")


DOCS = Path(__file__).parents[2] / "docs"
EXPLANATION = (DOCS / "explanation" / "verdict.md").read_text()
HOW_TO = (DOCS / "how-to" / "judge-a-run.md").read_text()


def effects(rule: ConditionRule) -> str:
    by_kind = [] if isinstance(rule.differs, str) else [f"{effect} ({kind})" for kind, effect in rule.differs.items()]
    unknown = "" if rule.unknown == "ignored" else rule.unknown
    return f"{', '.join(by_kind) or rule.differs}{', important' if rule.important else ''} | {unknown}"


def test_the_table_of_conditions_is_the_data_file() -> None:
    keys: dict[str, list[str]] = defaultdict(list)
    for rule in condition_rules():
        keys[effects(rule)] += [f"`{key}`" for key in rule.keys] if rule.differs != "ignored" else []
    rows = (f"| {effect} | {', '.join(names)} |" for effect, names in keys.items() if names)
    assert [row for row in rows if row not in EXPLANATION] == []


def test_tolerances_are_those_of_the_data_file() -> None:
    for name, found in {
        "published": default_tolerance("published"),
        "baseline, same nodes": default_tolerance("baseline", same_nodes=True),
        "baseline": default_tolerance("baseline"),
        "expectation": default_tolerance("expectation"),
    }.items():
        assert f"| {name} | {found.pct:.7g} % | {found.source} |" in EXPLANATION

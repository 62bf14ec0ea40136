# SPDX-License-Identifier: Apache-2.0
"""Acceptance sets and the catalogue."""

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.cli.main import load_command
from llmb.errors import UsageError
from llmb.verdict.expectations_file import acceptance_sets, find_acceptance_set


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

# SPDX-License-Identifier: Apache-2.0
"""A run keeps its logits where they are small beside the GPU's memory, and says so."""

from typing import Any

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Dtype, Recipe
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.report.plan_report import plan_table
from llmb.runs.choices import Choices, keeps_logits, logits_gb, logits_text
from llmb.runs.conditions import identity_of_plan
from llmb.runs.experiment import experiment_name
from llmb.runs.plan import EnginePlan, make_plan


def recipe_of(workload: str, size: str, gpu_type: str, scale: int = 8, **layout: int) -> Recipe:
    request = Request(workload=workload, size=size, gpu_type=gpu_type, scale=scale, overrides=Overrides(**layout))
    return resolve(Catalogue(), request)


def llama(gpu_type: str = "h200", **layout: int) -> Recipe:
    return recipe_of("pretrain_llama3.1", "8b", gpu_type, cp=1, **layout)


LARGE = {"mbs": 4}
LORA = recipe_of("finetune_llama3", "70b", "h100")


def plan_of(recipe: Recipe, **choices: Any) -> EnginePlan:
    return make_plan(recipe, Choices.model_validate(choices), device="cuda")


def row(plan: EnginePlan) -> str:
    """What the plan's table says of the logits."""
    (text,) = (cells[1] for cells in plan_table(plan, (), {}).rows if cells[0] == "logits")
    return text


def test_size_is_that_of_a_rank_in_the_dtype_of_the_run() -> None:
    whole = llama()
    assert logits_gb(whole) == pytest.approx(8192 * 128256 * 2 / 1e9)
    assert logits_gb(whole.model_copy(update={"dtype": Dtype.FP32})) == 2 * logits_gb(whole)
    assert logits_gb(recipe_of("pretrain_llama3.1", "8b", "h200", cp=2, tp=2)) == logits_gb(whole) / 4


@pytest.mark.parametrize(
    ("recipe", "memory_gb", "kept"),
    [
        pytest.param(llama(), 141, True, id="2.1 of 141 GB"),
        pytest.param(llama("h100"), 80, True, id="2.1 of 80 GB"),
        pytest.param(llama(**LARGE), 141, False, id="8.4 of 141 GB"),
        pytest.param(llama("h100", mbs=2), 80, False, id="4.2 of 80 GB"),
        pytest.param(llama(mbs=2), 141, True, id="4.2 of 141 GB"),
    ],
)
def test_default_depends_on_logits_and_memory(recipe: Recipe, memory_gb: float, kept: bool) -> None:
    assert recipe.gpu_memory_gb == memory_gb
    assert plan_of(recipe).keep_logits is kept


def test_a_device_of_unknown_memory_keeps_small_logits_alone() -> None:
    """A CPU, and a GPU that is not in the catalogue."""
    on_cpu = recipe_of("pretrain_llama3.1", "tiny", "cpu", scale=1)
    assert on_cpu.gpu_memory_gb is None
    assert logits_gb(on_cpu) < 0.06 < logits_gb(llama())
    assert keeps_logits(on_cpu)
    assert not keeps_logits(llama().model_copy(update={"gpu_memory_gb": None}))


def test_logits_without_use_are_not_kept() -> None:
    assert logits_gb(LORA) < 80 / 32
    assert not keeps_logits(LORA)


@pytest.mark.parametrize("given", [True, False])
def test_the_option_decides(given: bool) -> None:
    small, large = plan_of(llama(), keep_logits=given), plan_of(llama(**LARGE), keep_logits=given)
    assert (small.keep_logits, large.keep_logits) == (given, given)
    assert ("kept" in row(small), "kept" in row(large)) == (given, given)


def test_plan_states_choice_and_memory() -> None:
    assert row(plan_of(llama())) == "2.1 GB per micro-batch, kept for the backward pass"
    assert row(plan_of(llama(**LARGE))) == "chunked, recomputed for the backward pass unless small (all: 8.4 GB)"
    assert logits_text(LORA, kept=False) == "chunked"


def test_other_choices_have_other_names_and_are_no_repeats() -> None:
    usual, chunked = plan_of(llama()), plan_of(llama(), keep_logits=False)
    assert experiment_name(chunked) == f"{experiment_name(usual)}_chunked-logits"
    assert experiment_name(plan_of(llama(), keep_logits=True)) == experiment_name(usual)
    large, kept = plan_of(llama(**LARGE)), plan_of(llama(**LARGE), keep_logits=True)
    assert experiment_name(kept) == f"{experiment_name(large)}_logits"
    assert identity_of_plan(usual, "engine", {}).key != identity_of_plan(chunked, "engine", {}).key

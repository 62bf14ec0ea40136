# SPDX-License-Identifier: Apache-2.0
"""The largest published layouts fit their GPUs, as the engine's own step is counted."""

import pytest
from benchmarks.published_layouts import published_layouts

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.launch.programs.engine.program import count_ranks
from llmb.prediction.memory import estimate
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import fullest_ranks

LAYOUTS = {each.name: each for each in published_layouts(Catalogue())}
FLAGSHIPS = [
    *(f"pretrain_llama3.1 {each}" for each in ("8b {} h100 8", "70b {} h100 64", "405b {} h100 512")),
    *(f"pretrain_nemotron4 {each}" for each in ("15b {} h100 16", "340b {} h100 256")),
    "finetune_llama3 70b {} h100 8",
    "finetune_llama4-maverick 400b {} b200/h100 256",
]


@pytest.mark.measured
@pytest.mark.parametrize("name", [each.format(dtype) for each in FLAGSHIPS for dtype in ("bf16", "fp8")])
def test_a_published_layout_fits(name: str) -> None:
    assert_fits(LAYOUTS[name].plan, LAYOUTS[name].capacity_gib)


@pytest.mark.measured
def test_a_published_layout_with_eight_experts_for_a_token_fits() -> None:
    recipe = resolve(Catalogue(), Request(workload="pretrain_qwen3", size="30b", gpu_type="h100", release="mb-26.06"))
    assert_fits(make_plan(recipe, Choices(), device="cuda"), recipe.gpu_memory_gb)


def assert_fits(plan: EnginePlan, capacity_gib: float | None) -> None:
    ranks = fullest_ranks(plan.recipe.layout)
    use = count_ranks(plan, ranks, lambda _: None).model_copy(update={"capacity_gib": capacity_gib})
    assert use.fits, f"{use.needed_gib:.1f} of {capacity_gib} GiB"
    assert estimate(plan, ranks).needed_gib == pytest.approx(use.needed_gib, rel=0.05)

# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import pytest

from llmb.errors import UsageError
from llmb.runs.folder import experiment_name
from llmb.runs.plan import Plan, make_plan


def test_a_plan_survives_its_file(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(steps=7, seed=3, peak_lr=0.5, recompute="full")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.recipe.training.peak_lr == 0.5
    assert (plan.window.first, plan.window.last) == (4, 5)


def test_everything_wrong_is_said_at_once(tiny_plan: Callable[..., Plan]) -> None:
    recipe = tiny_plan().recipe
    with pytest.raises(UsageError) as caught:
        make_plan(recipe, device="cpu", steps=0, peak_lr=-1.0, warmup_steps=-5)
    for said in ("--steps is 0", "--lr is -1.0", "--warmup-steps is -5"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("pretrain_llama3.1", {"dtype": "fp8"}, "no fp8"),
        ("finetune_llama3", {}, "no LoRA"),
        ("pretrain_llama3.1", {"window": "35-60"}, "outside the run"),
        ("pretrain_llama3.1", {"window": "late"}, "no window"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_it_starts(
    tiny_plan: Callable[..., Plan], workload: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        tiny_plan(workload, **options)


def test_the_experiment_name_carries_the_configuration(tiny_plan: Callable[..., Plan]) -> None:
    name = experiment_name(tiny_plan(scale=4, overrides={"gbs": 16}))
    assert name == "pretrain_llama3.1_tiny_fp32_gpus4_tp1_pp1_cp1_vp1_ep1_mbs1_gbs16"

# SPDX-License-Identifier: Apache-2.0
"""Sizes of checkpoints are those of the model that is trained; scales that the documents give for them are shown."""

from pathlib import Path
from typing import Any

import pytest

from llmb.catalogue.catalogue import Catalogue, job_defaults
from llmb.catalogue.resolve import Request, resolve
from llmb.reports.plan_report import plan_document, plan_table
from llmb.reports.recipe_report import recipe_document, recipe_tables
from llmb.runs.choices import Choices
from llmb.runs.plan import Plan, Start, make_plan, scale_warnings
from llmb.runs.planning import origin_here

CATALOGUE = Catalogue()
NOWHERE = Path("/nowhere")
START = Start(path="/saved", step=50, consumed_samples=400)


def request(**fields: Any) -> Request:
    return Request(**{"workload": "pretrain_llama3.1", "gpu_type": "h100", **fields})


def plan(scale: int, *, resumes: bool = False, **choices: Any) -> Plan:
    recipe = resolve(CATALOGUE, request(size="8b", scale=scale))
    made = make_plan(recipe, Choices(**choices), device="cuda")
    return made.model_copy(update={"start": START}) if resumes else made


def shown(**fields: Any) -> dict[str, str]:
    recipe = resolve(CATALOGUE, request(**fields))
    table = next(recipe_tables(recipe, job_defaults(CATALOGUE, recipe), origin_here(CATALOGUE, NOWHERE, recipe)))
    return {row[0]: row[1] for row in table.rows}


def test_a_proxy_has_a_checkpoint_of_its_own_size() -> None:
    whole, proxy = {"size": "405b", "scale": 1024}, {"size": "405b", "scale": 32}
    assert shown(**whole)["checkpoint"].startswith("4,871 GB, saved by llmb")
    assert shown(**whole)["published checkpoint"] == "5200 GiB, saved by 512 to 2048 GPUs, loaded by 1024 or more"
    recipe = resolve(CATALOGUE, request(**proxy))
    assert (recipe.proxy, recipe.checkpoint) == (True, None)
    assert shown(**proxy)["checkpoint"].startswith("356.8 GB")
    assert "published checkpoint" not in shown(**proxy)
    document = recipe_document(recipe, job_defaults(CATALOGUE, recipe), origin_here(CATALOGUE, NOWHERE, recipe))
    assert document["checkpoint_size_gb"] == pytest.approx(356.8, abs=0.1)
    lora = resolve(CATALOGUE, Request(workload="finetune_llama3", size="70b", gpu_type="h100"))
    # 80 layers of rank 16 on the fused projection of 8,192 to 10,240, in fp32 with two moments.
    adapters = 80 * 16 * (8192 + 10240)
    document = recipe_document(lora, job_defaults(CATALOGUE, lora), origin_here(CATALOGUE, NOWHERE, lora))
    assert document["checkpoint_size_gb"] == 12 * adapters / 1e9
    assert shown(workload="finetune_llama3", size="70b", gpu_type="h100")["trained"].startswith("23,592,960 parameters")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (plan(16, save_checkpoint=True), []),
        (plan(16, resumes=True), []),
        (plan(8), []),
        (plan(8, save_checkpoint=True), ["runs that save checkpoints have 16 to 128 GPUs, not 8"]),
        (plan(256, checkpoint_interval=10), ["runs that save checkpoints have 16 to 128 GPUs, not 256"]),
        (plan(8, resumes=True), ["runs that load checkpoints have 16 GPUs or more, not 8"]),
    ],
)
def test_scales_at_which_nobody_saved_or_loaded_are_told(made: Plan, said: list[str]) -> None:
    warnings = list(scale_warnings(made))
    assert len(warnings) == len(said)
    for warning, text in zip(warnings, said, strict=True):
        assert text in warning
        assert "llama3.1-25.04" in warning or "line 178" in warning
    assert plan_document(made, "", (), {})["warnings"] == warnings
    assert [row[1] for row in plan_table(made, (), {}).rows if row[0] == "warning"] == warnings


def test_the_plan_says_how_large_each_checkpoint_is() -> None:
    rows = dict(row[:2] for row in plan_table(plan(16, checkpoint_interval=10), (), {}).rows)
    assert rows["checkpoints"] == "every 10 steps and at the end, about 96.36 GB each"

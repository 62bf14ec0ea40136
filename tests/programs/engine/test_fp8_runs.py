# SPDX-License-Identifier: Apache-2.0
"""Runs in FP8 say how they computed, in the title of their table and in every file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.report.run_report import plan_title
from llmb.runs.plan import Plan

Finished = Callable[..., dict[str, Any]]


def test_a_title_names_the_scaling_and_an_emulation(tiny_plan: Callable[..., Plan]) -> None:
    assert plan_title(tiny_plan(dtype="fp8")) == "pretrain_llama3.1 tiny fp8 (delayed scaling) on 2 x cpu"
    assert plan_title(tiny_plan(dtype="bf16")) == "pretrain_llama3.1 tiny bf16 on 2 x cpu"
    emulated = plan_title(tiny_plan(dtype="fp8", fp8_recipe="current", emulate_fp8=True))
    assert "fp8 (current scaling, emulated: the products are bf16)" in emulated


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fp8-recipe", "current", "--emulate-fp8", "--pp", "4", "--gbs", "4")])
def test_a_run_records_recipe_and_counts(finished: Finished, options: tuple[str, ...]) -> None:
    scale = "4" if options else "1"
    common = ("-w", "pretrain_llama3.1", "--scale", scale, "--dtype", "fp8", "--steps", "6", "--seq-len", "64")
    result = finished(*common, *options)
    recipe, emulated = ("current", True) if options else ("delayed", False)
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert (record["plan"]["fp8_recipe"], record["plan"]["emulate_fp8"]) == (recipe, emulated)
    assert (result["fp8"]["recipe"], result["fp8"]["emulated"]) == (recipe, emulated)
    assert record["result"]["fp8"] == result["fp8"]
    lines = (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    saturated = [json.loads(line)["fp8"]["saturated_tensors"] for line in lines]
    # At the start values grow; and a rank whose layers are in bf16 counts along with the others.
    assert any(saturated) is not emulated
    assert result["loss"]["last"] < result["loss"]["first"]

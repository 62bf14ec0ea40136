# SPDX-License-Identifier: Apache-2.0
"""Runs in FP8 say how they computed, in the title of their table and in every file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmb.reports.plan_report import plan_title, start_lines
from llmb.reports.run_report import run_table
from llmb.runs.attention_choice import fp8_product
from llmb.runs.conclusion import RunEvidence, conclude
from llmb.runs.plan import Plan
from llmb.runs.result import Fp8Report

Finished = Callable[..., dict[str, Any]]


def test_a_title_names_the_scaling_and_an_emulation(tiny_plan: Callable[..., Plan]) -> None:
    assert plan_title(tiny_plan(dtype="fp8")) == "pretrain_llama3.1 tiny fp8 (delayed scaling) on 2 x cpu"
    assert plan_title(tiny_plan(dtype="bf16")) == "pretrain_llama3.1 tiny bf16 on 2 x cpu"
    emulated = plan_title(tiny_plan(dtype="fp8", fp8_recipe="current", emulate_fp8=True))
    assert "fp8 (current scaling, emulated: the products are fp32)" in emulated


def test_a_run_begins_with_its_precision_and_product(tiny_plan: Callable[..., Plan]) -> None:
    lines = start_lines(tiny_plan(dtype="fp8"))
    assert lines[-3].endswith("tiny fp8 (delayed scaling) on 2 x cpu, 50 steps")
    assert lines[-2] == "weights: random; data: synthetic zipf"
    assert lines[-1] == "FP8 products are computed in fp32: FP8 values as fp32: fast on every CPU"
    assert not any("FP8" in line for line in start_lines(tiny_plan(dtype="bf16")))


def test_a_gpu_multiplies_in_fp8_or_as_specified_and_a_cpu_in_fp32() -> None:
    assert fp8_product("cuda", emulate=False).dtype == "fp8"
    assert fp8_product("cuda", emulate=True).dtype == "bf16"
    assert {fp8_product("cpu", emulate=emulate).dtype for emulate in (False, True)} == {"fp32"}


def test_the_table_names_the_products_and_why(tiny_plan: Callable[..., Plan]) -> None:
    product = fp8_product("cpu", emulate=False)
    report = Fp8Report(recipe="delayed", emulated=False, saturated_tensors=0, not_finite_tensors=0, product=product)
    plan = tiny_plan(dtype="fp8")
    result = conclude(RunEvidence(plan, [], 1, "")).model_copy(update={"fp8": report})
    (row,) = [cells for cells in run_table(plan, result).rows if cells[0] == "FP8 products"]
    assert (row[1], row[2]) == ("fp32", product.why)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--fp8-recipe", "current", "--emulate-fp8", "--pp", "4", "--gbs", "4"), marks=pytest.mark.slow)],
)
def test_a_run_records_recipe_and_counts(finished: Finished, options: tuple[str, ...]) -> None:
    scale = "4" if options else "1"
    common = ("-w", "pretrain_llama3.1", "--scale", scale, "--dtype", "fp8", "--steps", "6", "--seq-len", "64")
    result = finished(*common, *options)
    recipe, emulated = ("current", True) if options else ("delayed", False)
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert (record["plan"]["fp8_recipe"], record["plan"]["emulate_fp8"]) == (recipe, emulated)
    assert (result["fp8"]["recipe"], result["fp8"]["emulated"]) == (recipe, emulated)
    assert record["result"]["fp8"] == result["fp8"]
    assert record["environment"]["fp8_product"] == result["fp8"]["product"]
    assert record["environment"]["kernels"] == []  # a CPU has none that could be wrong
    assert result["fp8"]["product"]["dtype"] == "fp32"
    lines = (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    saturated = [json.loads(line)["fp8"]["saturated_tensors"] for line in lines]
    # At the start values grow; and a rank whose layers are in bf16 counts along with the others.
    assert any(saturated) is not emulated
    assert result["loss"]["last"] < result["loss"]["first"]

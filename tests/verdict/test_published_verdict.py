# SPDX-License-Identifier: Apache-2.0
"""Runs judged against the published figure of their recipe."""

from collections.abc import Callable
from typing import Any

import pytest
from recorded_runs import SXM, gpu_record, times_around
from verdict_samples import run_with_times

from llmb.base.missing import Missing
from llmb.base.statistics import describe
from llmb.catalogue.records import Window
from llmb.catalogue.resolve import Overrides
from llmb.runs.choices import Parallelism
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.record import RunRecord, VboostOutcome, queued_record
from llmb.runs.result import NOT_SUCCESSFUL, Result, Verdict
from llmb.verdict.published_verdict import verdict_of_recipe, ways_of_engine, with_verdict

DOCUMENT = "dgxc-benchmarking v25.04 llama3.1/README.md (lines of the rendered text)"


def result(mean_s: float, **changes: Any) -> Result:
    times = times_around(mean_s, steps=10)
    known = {"status": "success", "reason": None, "steps": 50, "loss": None, "peak_memory_gib": None}
    return Result(**{**known, "step_time_s": describe(times), **changes})


def verdict_of(mean_s: float, record: RunRecord, **changes: Any) -> Verdict:
    found = with_verdict(result(mean_s, **changes), record)
    assert found.verdict
    return found.verdict


def effects(verdict: Verdict) -> dict[str, str]:
    return {one.key: one.effect for one in verdict.conditions}


def test_a_slow_run_is_said_to_be_slow() -> None:
    found = verdict_of(13.15, gpu_record())
    assert found.verdict == "regressed"
    assert found.sentence.startswith("7.2 % slower than published (")
    assert "the published figure is the last step's, yours the mean of 35-44; program differs" in found.sentence
    reference = found.reference
    assert reference
    assert (reference.kind, reference.step_time_s, reference.window_text) == ("published", 12.27, "last")
    assert reference.window and (reference.window.first, reference.window.last) == (49, 49)
    assert (reference.convention, reference.source) == ("full", f"{DOCUMENT} line 54")
    assert effects(found) == {
        **dict.fromkeys(("window", "program"), "weakens"),
        **dict.fromkeys(("peak_tflops", "errata", "step_clock", "vboost"), "noted"),
    }


def test_the_same_window_is_no_condition() -> None:
    assert "window" not in effects(verdict_of(12.3, gpu_record(window="last")))
    assert "window" in effects(verdict_of(12.3, gpu_record(window="all")))


@pytest.mark.parametrize(
    ("outcome", "own"),
    [
        (None, None),
        (VboostOutcome(level=1, nodes_set=2, nodes=2), "no condition"),
        (VboostOutcome(level=1, nodes_set=1, nodes=2), "set on 1 of 2 nodes"),
    ],
    ids=["not by the job", "on all nodes", "on some"],
)
def test_what_came_of_a_boost_is_weighed(outcome: VboostOutcome | None, own: str | None) -> None:
    found = verdict_of(12.3, gpu_record().model_copy(update={"vboost": outcome}))
    assert {one.key: one.own for one in found.conditions}.get("vboost", "no condition") == own


def test_the_window_is_the_one_that_the_steps_decided() -> None:
    steady = Window(first=12, last=49, rule="auto")
    found = verdict_of(12.3, gpu_record(window="auto"), window=steady)
    assert "the published figure is the last step's, yours the mean of 12-49" in found.sentence
    assert {one.key: one.own for one in found.conditions}["window"] == "12-49"


@pytest.mark.parametrize(
    ("device", "verdict"),
    [(SXM, "pass"), (None, "pass"), ("NVIDIA H100 PCIe", "not comparable"), ("NVIDIA H200", "not comparable")],
)
def test_another_gpu_than_the_published_one_has_no_verdict(device: str | None, verdict: str) -> None:
    found = verdict_of(12.3, gpu_record(device=device))
    assert found.verdict == verdict
    assert found.delta_pct == pytest.approx(0.2445, rel=1e-3)
    if verdict != "pass":
        (variant,) = [one for one in found.conditions if one.effect == "prevents"]
        assert (variant.key, variant.own, variant.reference) == ("hardware.device", device, "NVIDIA H100 SXM 80 GB")


def test_synthetic_data_and_other_adapters_than_the_documents() -> None:
    found = verdict_of(4.1, gpu_record(**LORA))
    (data,) = [one for one in found.conditions if one.key == "data"]
    assert (data.own, data.reference, data.effect) == ("synthetic", "SQuAD packed 2048", "weakens")
    assert verdict_of(4.1, gpu_record(**LORA, lora_rank=64)).verdict == "not comparable"


MAVERICK = {
    "workload": "finetune_llama4-maverick",
    "size": "400b",
    "scale": 256,
    "gpu_type": "b200",
    "device": None,
    "synthetic": True,
}


def test_the_window_of_the_document_is_no_condition() -> None:
    assert "window" not in effects(verdict_of(0.224, gpu_record(**MAVERICK, window="11-44")))


@pytest.mark.parametrize(
    ("routing", "found"),
    [
        ({}, {}),
        ({"force_load_balancing": True}, {"force_load_balancing": "noted"}),
        ({"capacity_factor": 0}, {"expert_rows": "weakens"}),
        ({"capacity_factor": 1.25}, {"expert_rows": "weakens"}),
    ],
)
def test_tokens_are_dropped_in_the_published_run(routing: dict[str, Any], found: dict[str, str]) -> None:
    """So that every expert computes as many rows; a run without that does other work."""
    verdict = verdict_of(0.224, gpu_record(**MAVERICK, **routing))
    keys = ("force_load_balancing", "expert_rows", "capacity_factor")
    assert {key: effect for key, effect in effects(verdict).items() if key in keys} == found


def test_a_printed_time_that_is_a_mean_of_steps_is_said_to_be_that() -> None:
    """Release 24.11 prints means of the last five steps."""
    figure = gpu_record(size="405b", scale=576, release="24.11")
    sentence = verdict_of(17.2, figure).sentence
    assert "the published figure is the mean of 45-49, yours the mean of 35-44" in sentence
    same = verdict_of(17.2, gpu_record(size="405b", scale=576, release="24.11", window="45-49"))
    assert "window" not in effects(same)


LORA = {"workload": "finetune_llama3", "size": "70b", "gpu_type": "gb200", "device": None, "synthetic": True}
LARGE = {"size": "405b", "scale": 512}
DIFFER = {
    "405b": (LARGE, "program and overlap of tensor-parallel communication (worth 8 to 10 %) differ"),
    "405b, FP8": (
        {**LARGE, "dtype": "fp8"},
        "program and overlap of tensor-parallel communication (worth 9 to 13 %) differ",
    ),
    "405b, other FP8 scaling": (
        {**LARGE, "dtype": "fp8", "fp8_recipe": "current-all"},
        "FP8 scaling, program and overlap of tensor-parallel communication (worth 9 to 13 %) differ",
    ),
    "8b": ({}, "program differs"),
    "8b, parameters sharded": (
        {"parallelism": Parallelism(dp_sharding="full")},
        "data-parallel sharding and program differ",
    ),
    "nemotron": (
        {"workload": "pretrain_nemotron4", "size": "15b", "scale": 16},
        "program and overlap of tensor-parallel communication (worth 8 to 10 %) differ",
    ),
    "maverick": (
        MAVERICK,
        "CUDA graphs (worth 10 to 50 %), data, program and overlap of tensor-parallel communication differ",
    ),
    "maverick, dropless": (
        {**MAVERICK, "capacity_factor": 0},
        "CUDA graphs (worth 10 to 50 %), data, distribution of expert rows (worth 18 to 36 %), program and overlap of "
        "tensor-parallel communication differ",
    ),
    "lora": (LORA, "CUDA graphs (worth 2 to 8 %), data and program differ"),
    "lora, weights sharded": (
        {**LORA, "parallelism": Parallelism(dp_sharding="full")},
        "CUDA graphs (worth 2 to 8 %), data, data-parallel sharding and program differ",
    ),
}


@pytest.mark.parametrize(("run", "differ"), DIFFER.values(), ids=DIFFER)
def test_a_sentence_names_what_differs_from_the_published_run(run: dict[str, Any], differ: str) -> None:
    record = gpu_record(**run)
    figure = record.plan.recipe.figure
    assert figure
    sentence = verdict_of(figure.step_time_s, record).sentence
    spread = "has no spread" if figure.step_time_std_s is None else "is of one run"
    assert f"; {differ}; a soft verdict: a single published figure {spread}; " in sentence


@pytest.mark.parametrize(
    ("run", "tp_overlap", "weight_gradients"),
    [
        ({}, "none", "by the product"),
        ({"dtype": "fp8"}, "none", "after the product"),
        ({"parallelism": Parallelism(dp_sharding="full")}, "none", "after the product"),
        (LARGE, "in part of the backward pass", "by the product"),
        ({**LARGE, "compiled": False}, "in part of the backward pass", "after the product"),
        ({**LARGE, "dtype": "fp8"}, "in part of the backward pass", "after the product"),
        ({**LARGE, "communication": "fused"}, "with products", "by the product"),
        (LORA | {"gpu_type": "h100", "scale": 8}, "none", "by the product"),
    ],
)
def test_the_ways_of_a_run_are_those_of_its_plan(run: dict[str, Any], tp_overlap: str, weight_gradients: str) -> None:
    record = gpu_record(**run)
    assert isinstance(record.plan, EnginePlan)
    ways = ways_of_engine(record.plan)
    assert (ways["tp_overlap"], ways["weight_gradients"]) == (tp_overlap, weight_gradients)
    figure = record.plan.recipe.figure
    if figure is None:
        return
    differing = effects(verdict_of(10.0, record))
    published = record.plan.recipe.published_way("weight_gradients")
    assert ("weight_gradients" in differing) == (published not in (None, weight_gradients))


def test_a_deviation_that_a_document_prints_widens_the_interval() -> None:
    """Of ten steps of LoRA: 0.009 s, of a population."""
    verdict = verdict_of(4.07, gpu_record(**LORA))
    assert verdict.reference and verdict.reference.step_time_s_ci95
    low, high = verdict.reference.step_time_s_ci95
    assert (high - low) / 2 == pytest.approx(1.96 * 0.009 / 3, rel=0.001)
    assert verdict.ci95_pct and verdict.ci95_pct[1] - verdict.ci95_pct[0] > 100 * (high - low) / 4.07


@pytest.mark.parametrize("run", [LARGE, MAVERICK, LORA], ids=["405b", "maverick", "lora"])
def test_what_is_as_published_is_no_condition(run: dict[str, Any]) -> None:
    recipe = gpu_record(**run).plan.recipe
    same = {condition.key: condition.value for condition in recipe.conditions}
    judged = run_with_times(times_around(4.0, steps=10))
    named = effects(verdict_of_recipe(recipe, [judged], same))
    assert same and not named.keys() & same.keys()
    for key in same:
        other = verdict_of_recipe(recipe, [judged], same | {key: "otherwise"})
        (condition,) = [one for one in other.conditions if one.key == key]
        assert condition.why and (condition.own, condition.reference) == ("otherwise", same[key])


@pytest.mark.parametrize("device", [None, SXM, "NVIDIA H100 PCIe"])
def test_a_figure_of_an_unknown_gpu_type_is_said_to_be_that(device: str | None) -> None:
    own = verdict_of(0.297, gpu_record(**MAVERICK))
    assert own.reference and own.reference.step_time_s == 0.224, "its own GPU type has another figure"
    assert "gpu_type" not in effects(own)
    found = verdict_of(0.297, gpu_record(**MAVERICK | {"gpu_type": "h100", "device": device}))
    assert found.reference and found.reference.step_time_s == 0.297
    (gpu,) = [one for one in found.conditions if one.key in ("gpu_type", "hardware.device")]
    assert (gpu.key, gpu.own, gpu.reference, gpu.effect) == ("gpu_type", "h100", None, "weakens")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "failed", "reason": "killed by signal 9", "step_time_s": NOT_SUCCESSFUL}, "killed by signal 9"),
        ({"status": "invalid", "reason": "the loss is nan", "step_time_s": NOT_SUCCESSFUL}, "the loss is nan"),
        ({"measurement_reason": "it includes warm-up"}, "it includes warm-up"),
        ({"step_time_s": Missing("profiled")}, "profiled"),
    ],
)
def test_a_run_that_is_no_measurement_is_invalid(changes: dict[str, Any], reason: str) -> None:
    found = verdict_of(12.3, gpu_record(), **changes)
    assert (found.verdict, found.reason) == ("invalid", reason)


def test_without_a_published_figure_the_reason_stands_instead(tiny_plan: Callable[..., Plan]) -> None:
    tiny = with_verdict(result(0.5), queued_record(tiny_plan(), ()))
    assert tiny.verdict == Missing("no published figure: a recipe of llmb itself, without published figures")
    changed = with_verdict(result(0.5), gpu_record(overrides=Overrides(mbs=2)))
    assert changed.verdict == Missing("no published figure: the layout differs from the published one (mbs)")

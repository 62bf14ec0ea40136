# SPDX-License-Identifier: Apache-2.0
"""The statistics of packed sequences that a result takes from the steps of its window."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from quick_order import step

from llmb.metrics.throughput import model_flops
from llmb.runs.plan import EnginePlan
from llmb.runs.result import RunEvidence, conclude, measured_packing
from llmb.runs.steps import Step

GBS = 8


def packed(number: int, tokens: int, squares: int, chunked: int | None = None) -> Step:
    plain = step(number)
    return replace(
        plain, tokens=tokens, padded_tokens=GBS * 128, sum_of_squares=squares, chunked_sum_of_squares=chunked
    )


def test_figures_are_those_of_the_steps_in_the_window(tiny_plan: Callable[..., EnginePlan]) -> None:
    plan = tiny_plan("finetune_llama3", steps=4, window="2-3")
    steps = [packed(0, 1, 1), packed(1, 1, 1), packed(2, 960, 8000), packed(3, 1000, 24_000)]
    result = conclude(RunEvidence(plan, steps))
    assert result.packing is not None
    assert (result.packing.tokens, result.packing.sum_of_squares) == (980 / GBS, 16_000 / GBS)
    assert result.step_time_s
    assert result.real_tokens_per_s == pytest.approx(980 / result.step_time_s.mean)
    assert result.tokens_per_s == pytest.approx(GBS * 128 / result.step_time_s.mean)
    model = plan.recipe.model
    assert result.parameters is not None
    adapters = 4 * 16 * (model.hidden_size + model.head_dim * (model.attention_heads + 2 * model.kv_heads))
    assert result.parameters.trainable == adapters < result.parameters.total
    counted = model_flops(model, 128, causal=False, frozen=True, packing=result.packing) + 6 * adapters * 980 / GBS
    assert result.flops_per_sequence is not None
    assert result.flops_per_sequence["packed"] == pytest.approx(counted)


def test_steps_without_long_documents_count_whole_ones_in_chunks(tiny_plan: Callable[..., EnginePlan]) -> None:
    plan = tiny_plan("finetune_llama4-maverick")
    found = measured_packing(plan, [packed(0, 960, 8000), packed(1, 960, 9000, chunked=7000)])
    assert found is not None
    assert found.chunked_sum_of_squares == (8000 + 7000) / 2 / GBS
    assert measured_packing(plan, [packed(0, 960, 8000), step(1)]) is None
    assert measured_packing(plan, []) is None

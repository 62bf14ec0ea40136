# SPDX-License-Identifier: Apache-2.0
"""Packed documents: what is expected of them and what was measured."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random
from statistics import fmean, pstdev

import pytest
from quick_order import step

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.packing import (
    document_lengths,
    expected_squares,
    fitted_mean,
    longest_document,
    scaled_mean,
    synthetic_packing,
)
from llmb.catalogue.records import ChunkedAttention, DocumentLengths, Packing
from llmb.catalogue.throughput import model_flops
from llmb.runs.conclusion import RunEvidence, conclude, measured_packing
from llmb.runs.plan import EnginePlan
from llmb.runs.steps import Step

LLAMA = Catalogue().models[("llama3.1", "tiny")]
MAVERICK = Catalogue().models[("llama4-maverick", "tiny")]


def squares_of_all_packings(seq_len: int, mean: int, chunk: int) -> float:
    """The mean over every equally likely draw of lengths, each as the generator packs them."""
    found = []
    for lengths in product(range(1, longest_document(mean) + 1), repeat=seq_len):
        left, total = seq_len, 0
        for length in lengths:
            whole, rest = divmod(min(length, left), chunk)
            total += whole * chunk**2 + rest**2
            left -= min(length, left)
        found.append(total)
    return sum(found) / len(found)


@pytest.mark.parametrize("mean", [2, 3])
@pytest.mark.parametrize("seq_len", [3, 5, 6])
def test_the_expected_sum_of_squares_is_the_mean_over_all_packings(seq_len: int, mean: int) -> None:
    assert expected_squares(seq_len, mean) == pytest.approx(squares_of_all_packings(seq_len, mean, chunk=99))
    assert expected_squares(seq_len, mean, 2) == pytest.approx(squares_of_all_packings(seq_len, mean, chunk=2))


@pytest.mark.parametrize("kind", ["uniform", "squad"])
@pytest.mark.parametrize(("seq_len", "published"), [(4096, 842603), (2048, 488991)])
def test_the_published_packing_is_met_within_half_a_percent(
    seq_len: int, published: float, kind: DocumentLengths
) -> None:
    mean = fitted_mean(published, seq_len, kind)
    near = (mean - 1, mean, mean + 1)
    errors = {each: abs(expected_squares(seq_len, each, kind=kind) / published - 1) for each in near}
    assert min(errors, key=errors.__getitem__) == mean
    assert errors[mean] < 0.005


def test_lengths_like_squads_have_the_mean_and_the_spread_that_were_measured() -> None:
    lengths = document_lengths(1000, "squad")
    assert fmean(lengths) == pytest.approx(1000, rel=0.002)
    assert pstdev(lengths) / 1000 == pytest.approx(0.364, rel=0.005)
    assert list(lengths) == sorted(lengths)
    assert longest_document(1000, "squad") == 2117
    # The mean that shorter sequences are scaled from is the one that fits the published statistics.
    assert fitted_mean(842603, 4096, "squad") == scaled_mean(4096)
    assert scaled_mean(128) == 6


def test_expected_squares_are_the_mean_of_drawn_sequences() -> None:
    """Lengths are drawn as the engine draws them."""
    drawn, lengths = Random(1), document_lengths(20, "squad")
    found = []
    for _ in range(4000):
        left, total = 128, 0
        while left:
            length = min(drawn.choice(lengths), left)
            total, left = total + length**2, left - length
        found.append(total)
    assert expected_squares(128, 20, kind="squad") == pytest.approx(fmean(found), rel=0.01)


def test_only_documents_longer_than_a_chunk_are_counted_in_chunks() -> None:
    assert synthetic_packing(LLAMA, 128, 100).chunked_sum_of_squares is None
    assert synthetic_packing(MAVERICK, 128, 32).chunked_sum_of_squares is None
    packing = synthetic_packing(MAVERICK, 128, 100)
    assert packing.chunked_sum_of_squares is not None
    assert packing.chunked_sum_of_squares < packing.sum_of_squares


def test_attention_flops_are_those_of_the_documents() -> None:
    """One global layer in four; products of weights stay as they are."""
    model = MAVERICK.model_copy(
        update={
            "chunked_attention": ChunkedAttention(chunk_size=64, global_every=4, floor_scale=1, attn_scale=0.1),
            "layers": 4,
        }
    )
    packing = Packing(tokens=128, sum_of_squares=9000, chunked_sum_of_squares=5000, source="")
    width = model.attention_heads * model.head_dim
    saved = model_flops(model, 128, causal=False) - model_flops(model, 128, causal=False, packing=packing)
    assert saved == pytest.approx(12 * width * (128**2 + 3 * 2 * 64**2 - 9000 - 3 * 5000))


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

# SPDX-License-Identifier: Apache-2.0
"""The published tables, recomputed; the FLOP conventions, against counts made by hand."""

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Convention, OtherParts, Packing
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.catalogue.throughput import flops_per_sequence, model_flops, routed_share, throughput

CATALOGUE = Catalogue()
SUITE = [figure for published in CATALOGUE.published.values() for figure in published.figures]
TABLE = [figure for figure in SUITE if figure.expectation.kind == "table"]
# Printed from unrounded step times: the rows contradict themselves, and their notes say so.
CONTRADICTIONS = {("405b", "fp8", 32, "24.11"), ("405b", "fp8", 96, "24.11"), ("405b", "fp8", 192, "24.11")}


def test_there_are_seventy_rows() -> None:
    assert len(TABLE) == 70


@pytest.mark.parametrize("figure", TABLE, ids=lambda f: f"{f.size}-{f.dtype}-{f.gpus}-{f.expectation.release}")
def test_a_published_row_is_reproduced(figure) -> None:
    expected = figure.expectation
    request = Request(
        workload=figure.workload,
        size=figure.size,
        dtype=figure.dtype,
        gpu_type=figure.gpu_type,
        scale=figure.gpus,
        release=expected.release,
    )
    recipe = resolve(CATALOGUE, request)
    assert expected in recipe.expectations
    result = throughput(recipe, expected.step_time_s)
    agrees = result.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=2e-4)
    contradicts_itself = (figure.size, figure.dtype, figure.gpus, expected.release) in CONTRADICTIONS
    assert agrees != contradicts_itself
    assert any("unrounded" in note for note in expected.notes) == contradicts_itself
    assert result.mfu_pct["published"] == pytest.approx(expected.mfu_pct, abs=0.06)
    if expected.days_per_1t_tokens is None:
        assert result.days_per_1t_tokens is None
        assert "proxy" in result.reasons["days_per_1t_tokens"]
    else:
        assert result.days_per_1t_tokens == pytest.approx(expected.days_per_1t_tokens, abs=0.011)


@pytest.mark.parametrize(
    ("model", "size", "seq_len", "full", "causal"),
    [
        ("llama3.1", "8b", 8192, 4.7442e14, 4.2165e14),
        ("llama3.1", "70b", 8192, 3.9439e15, 3.68e15),
        ("llama3.1", "405b", 8192, 2.1507e16, 2.0676e16),
        ("nemotron4", "15b", 4096, 3.85e14, 3.6521e14),
        ("nemotron4", "340b", 4096, 8.6212e15, 8.4431e15),
        ("llama4-maverick", "400b", 4096, 4.4599e14, 4.2125e14),
        ("llama3", "70b", 2048, 8.8702e14, 8.7053e14),
        # 6 x the active parameters that transformers counts, without embedding, norms and router, and attention.
        ("qwen3", "8b", 8192, 4.9074e14, 4.3136e14),
        ("mixtral", "8x7b", 4096, 3.3967e14, 3.2648e14),
    ],
)
def test_flops_of_the_true_models(model: str, size: str, seq_len: int, full: float, causal: float) -> None:
    record = CATALOGUE.models[(model, size)]
    assert model_flops(record, seq_len, causal=False) == pytest.approx(full, rel=1e-4)
    assert model_flops(record, seq_len, causal=True) == pytest.approx(causal, rel=1e-4)


def test_experts_have_the_part_of_the_flops_that_is_missing_without_them() -> None:
    with_experts = [model for model in CATALOGUE.models.values() if model.moe and not model.multi_token_layers]
    assert len(with_experts) > 10
    for model in with_experts:
        none = model.model_copy(update={"moe": model.moe.model_copy(update={"ffn_hidden_size": 0})})
        whole, rest = (model_flops(each, 4096, causal=True) for each in (model, none))
        head = 6 * 4096 * model.hidden_size * model.vocab_size
        assert routed_share(model, 4096) == pytest.approx((whole - rest) / (whole - head)), model
        parts = (model.other_parts or OtherParts()).model_copy(update={"multi_token_layers": 1})
        further = model.model_copy(update={"other_parts": parts})
        assert routed_share(further, 4096) == routed_share(model, 4096)


def test_lora_counts_frozen_weights_and_packed_documents() -> None:
    for gpu_type, packed, printed in (("gb200", 5.682e14, 5.8067e14), ("b200", 1.1453e15, 1.18e15)):
        recipe = resolve(CATALOGUE, Request(workload="finetune_llama3", size="70b", gpu_type=gpu_type, scale=8))
        assert flops_per_sequence(recipe, Convention.PACKED) == pytest.approx(packed, rel=1e-4)
        assert flops_per_sequence(recipe, Convention.PUBLISHED) == printed
        # Without packing, two thirds of the weights' products and all of attention's remain.
        whole = {causal: model_flops(recipe.model, recipe.layout.seq_len, causal=causal) for causal in (False, True)}
        for convention, causal in ((Convention.FULL, False), (Convention.CAUSAL, True)):
            scores = 12 * 8192 * recipe.layout.seq_len**2 * 80 * (0.5 if causal else 1)
            expected = (whole[causal] - scores) * 2 / 3 + scores
            assert flops_per_sequence(recipe, convention) == pytest.approx(expected)


def test_adapters_add_three_passes_of_their_own() -> None:
    recipe = resolve(CATALOGUE, Request(workload="finetune_llama3", size="70b", gpu_type="b200", scale=8))
    own = 6 * 80 * 16 * (8192 + 8192 + 2 * 1024)
    for convention, tokens in ((Convention.FULL, 4096), (Convention.CAUSAL, 4096), (Convention.PACKED, 4096)):
        frozen, adapted = (flops_per_sequence(recipe, convention, lora=lora) for lora in (None, recipe.lora))
        assert frozen is not None
        assert adapted is not None
        assert adapted - frozen == pytest.approx(own * tokens)
    assert flops_per_sequence(recipe, Convention.PUBLISHED, lora=recipe.lora) == 1.18e15


def test_real_tokens_are_told_from_padded_ones() -> None:
    recipe = resolve(CATALOGUE, Request(workload="finetune_llama3", size="70b", gpu_type="gb200", scale=8))
    result = throughput(recipe, 2.0)
    assert (result.tokens_per_s, result.real_tokens_per_s) == (64 * 2048 / 2, 64 * 2030 / 2)
    trained = Packing(tokens=1000, sum_of_squares=90_000, source="steps")
    measured = throughput(recipe, 2.0, packing=trained)
    assert (measured.tokens_per_s, measured.real_tokens_per_s) == (64 * 2048 / 2, 64 * 1000 / 2)
    assert measured.flops_per_sequence["packed"] == model_flops(
        recipe.model, 2048, causal=False, frozen=True, packing=trained
    )
    assert measured.flops_per_sequence["published"] == result.flops_per_sequence["published"]


def test_the_document_formula_serves_depths_it_does_not_print() -> None:
    request = Request(
        workload="finetune_llama3", size="70b", gpu_type="gb200", scale=8, overrides=Overrides(layers=160)
    )
    flops = flops_per_sequence(resolve(CATALOGUE, request), Convention.PUBLISHED)
    assert flops == pytest.approx(2 / 3 * 2 * 8.7053e14, rel=0.02)


def test_chunked_attention_counts_only_pairs_within_a_chunk() -> None:
    model = CATALOGUE.models[("llama4-maverick", "400b")]
    long, chunk = 16_384, 8192
    difference = model_flops(model.model_copy(update={"chunked_attention": None}), long, causal=False) - model_flops(
        model, long, causal=False
    )
    chunked_layers = 36
    assert difference == 12 * 40 * 128 * chunked_layers * (long**2 - 2 * chunk**2)


def test_unknown_stays_unknown() -> None:
    result = throughput(
        resolve(CATALOGUE, Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)), 0.5
    )
    assert result.mfu_pct == {"published": None, "full": None, "causal": None, "packed": None}
    assert result.tflops_per_gpu["published"] is None
    assert set(result.reasons) == {"published", "packed", "mfu_pct"}
    assert result.tokens_per_s == result.real_tokens_per_s == 8 * 128 / 0.5
    assert result.tokens_per_s_per_gpu == 8 * 128 / 0.5 / 2

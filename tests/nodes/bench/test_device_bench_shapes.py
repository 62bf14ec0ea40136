# SPDX-License-Identifier: Apache-2.0
"""The shapes of a recipe's products and attention are all of its FLOPs, and each GPU has its part."""

import math

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve, sizes_of
from llmb.catalogue.throughput import model_flops
from llmb.launch.site.site import Machine
from llmb.nodes.bench.device_bench import (
    attention_cases,
    attention_shapes,
    gemm_cases,
    passes_of,
    product_case,
    product_text,
    recipe_of,
    weights_of,
)
from llmb.nodes.bench.protocol import AttentionCase, ProductCase

CATALOGUE = Catalogue()
ALL_SIZES = [(w, size) for w in CATALOGUE.workloads.values() for size in sizes_of(w)]
SIZES = [(w.workload, size) for w, size in ALL_SIZES if CATALOGUE.is_trainable(w, size)]
OTHERS = [(w.workload, size) for w, size in ALL_SIZES if not CATALOGUE.is_trainable(w, size)]
LLAMA = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", dtype="bf16", scale=8)


def recipe(workload="pretrain_llama3.1", size="8b", **overrides):
    return resolve(CATALOGUE, Request(workload=workload, size=size, overrides=Overrides(**overrides)))


@pytest.mark.parametrize(("workload", "size"), SIZES)
def test_products_of_all_gpus_are_the_models_flops(workload, size) -> None:
    """By the independent count of metrics; what TP and CP shard, and experts by EP and ETP, is each GPU's part.

    Shards that are not whole numbers of rows are rounded down, so figures are compared to a thousandth.
    """
    found = recipe(workload, size)
    layout, passes = found.layout, passes_of(found)
    products = layout.tp * layout.cp * len(passes) * sum(
        weights.count * product_case(weights, "bf16", "forward").flops
        for weights in weights_of(found.model, layout)
    )  # fmt: skip
    whole, causal = (
        model_flops(found.model, layout.seq_len, causal=half, frozen=found.task == "lora") for half in (False, True)
    )
    assert products == pytest.approx(layout.mbs * (2 * causal - whole), rel=1e-3)


@pytest.mark.parametrize(("workload", "size"), OTHERS)
def test_shapes_of_parts_that_are_not_known_are_refused(workload: str, size: str) -> None:
    request = Request(workload=workload, size=size, gpu_type="gb300")
    with pytest.raises(UsageError, match="cannot be measured, because the model has"):
        recipe_of(CATALOGUE, request, (), "cuda", Machine(gpu_names=("NVIDIA GB300",), cores=1))


@pytest.mark.parametrize(("workload", "size"), SIZES)
def test_attention_of_all_gpus_is_the_models(workload, size) -> None:
    """Forward; metrics count three such passes for a step, as every convention of MFU does."""
    found = recipe(workload, size)
    works = [asked.case.work for asked in attention_cases(found, (), 0)]
    forward = [work for work in works if isinstance(work, AttentionCase) and work.direction == "forward"]
    shapes = attention_shapes(found)
    flops = found.layout.tp * sum(work.flops * shape.count for work, shape in zip(forward, shapes, strict=True))
    whole, causal = (model_flops(found.model, found.layout.seq_len, causal=half) for half in (False, True))
    assert 3 * flops == pytest.approx(found.layout.mbs * (whole - causal), rel=1e-9)


def test_a_layers_shapes_are_those_of_the_model() -> None:
    found = resolve(CATALOGUE, LLAMA)
    assert found.layout.cp == 2, "half of the 8192 tokens are on each GPU"
    shapes = {weights.name: (weights.m, weights.k, weights.n, weights.count) for weights in weights_of(
        found.model, found.layout)}  # fmt: skip
    assert shapes == {
        "qkv": (4096, 4096, 6144, 32),
        "attention_output": (4096, 4096, 4096, 32),
        "gate_up": (4096, 4096, 28672, 32),
        "down": (4096, 14336, 4096, 32),
        "logits": (4096, 4096, 128256, 1),
    }


def test_tensor_parallelism_shards_outputs_and_then_inputs() -> None:
    found = resolve(CATALOGUE, Request(workload="pretrain_llama3.1", size="405b", gpu_type="h100", scale=512))
    shapes = {weights.name: (weights.k, weights.n) for weights in weights_of(found.model, found.layout)}
    assert found.layout.tp == 8
    assert shapes["qkv"] == (16384, 18432 // 8) and shapes["attention_output"] == (16384 // 8, 16384)
    assert shapes["gate_up"] == (16384, 2 * 53248 // 8) and shapes["down"] == (53248 // 8, 16384)
    (shape,) = attention_shapes(found)
    assert (shape.heads, shape.kv_heads, shape.seq_len) == (16, 1, 8192)


@pytest.mark.parametrize(
    ("training_pass", "text"),
    [("forward", "2 x 3 x 5"), ("input_gradient", "2 x 5 x 3"), ("weight_gradient", "5 x 2 x 3")],
)
def test_a_passs_shape_is_that_of_its_own_product(training_pass, text) -> None:
    case = ProductCase(m=2, k=3, n=5, dtype="bf16", training_pass=training_pass)
    assert product_text(case) == text
    assert case.flops == 2 * math.prod((2, 3, 5))


def test_frozen_weights_have_no_gradient() -> None:
    labels = {asked.label for asked in gemm_cases(recipe("finetune_llama3", "tiny"), ["bf16"], "cpu", 0)}
    assert "qkv_dgrad" in labels and "square_forward" in labels
    assert not [label for label in labels if label.endswith("wgrad")]


def test_logits_stay_in_bf16_and_are_measured_once() -> None:
    asked = gemm_cases(recipe(), ["bf16", "fp8"], "cuda", 5.0)
    logits = [(one.label, one.dtype) for one in asked if one.label.startswith("logits")]
    assert logits == [(f"logits_{word}", "bf16") for word in ("forward", "dgrad", "wgrad")]
    assert len({one.case.name for one in asked}) == len(asked)


def test_the_product_with_the_most_flops_of_a_step_is_sustained() -> None:
    asked = gemm_cases(recipe(), ["bf16"], "cuda", 5.0)
    (sustained,) = (one for one in asked if one.case.sustained_s)
    assert sustained.label.startswith("gate_up") and sustained.case.sustained_s == 5.0


def test_chunks_are_sequences_of_their_own() -> None:
    found = recipe("finetune_llama4-maverick", "400b", seq_len=16384)
    whole, chunked = sorted(attention_shapes(found), key=lambda shape: shape.name)
    assert (whole.seq_len, chunked.seq_len, chunked.batch) == (16384, 8192, 2 * found.layout.mbs)
    assert whole.count + chunked.count == found.layout.layers

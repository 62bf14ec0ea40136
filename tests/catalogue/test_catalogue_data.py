# SPDX-License-Identifier: Apache-2.0
"""The shipped data, complete and as published."""

import pytest

from llmb.catalogue.catalogue import Catalogue, layout_of, model_of
from llmb.catalogue.records import Convention
from llmb.catalogue.resolve import Request, is_tiny, resolve
from llmb.catalogue.throughput import flops_per_sequence, parameter_count

FIT_ONE_GPU = {("pretrain_qwen3", "0.6b")}


def test_every_seed_table_is_there(catalogue: Catalogue) -> None:
    published = {
        (name, table.size, table.release): [row.gpus for row in table.rows]
        for name, workload in catalogue.workloads.items()
        for table in workload.layouts
        if table.document in catalogue.published
    }
    assert published == {
        ("pretrain_llama3.1", "405b", "24.11"): [32, 96, 192, 576, 1152, 2304],
        ("pretrain_llama3.1", "8b", "25.04"): [8, 16, 32, 64, 128],
        ("pretrain_llama3.1", "70b", "25.04"): [64, 128, 256, 512, 1024, 2048],
        ("pretrain_llama3.1", "405b", "25.04"): [32, 64, 128, 512, 1024, 2048],
        ("pretrain_nemotron4", "15b", "25.04"): [16, 32, 64, 128, 256, 512, 1024, 2048],
        ("pretrain_nemotron4", "340b", "25.04"): [256, 512, 1024, 2048],
        ("finetune_llama3", "70b", "25.12"): [8, 16, 32],
        ("finetune_llama4-maverick", "400b", "25.07"): [256],
    }


def test_every_published_figure_is_there(catalogue: Catalogue) -> None:
    suite = [figure for published in catalogue.published.values() for figure in published.figures]
    kinds = [figure.expectation.kind for figure in suite]
    assert (kinds.count("table"), kinds.count("example")) == (70, 7)
    for figure in suite:
        expectation = figure.expectation
        assert expectation.source
        assert expectation.line > 0
        assert expectation.window in {"last", "11-44", "35-44"}
        assert expectation.convention


def test_every_layout_row_of_a_document_has_its_line(catalogue: Catalogue) -> None:
    for workload in catalogue.workloads.values():
        for table in workload.layouts:
            if table.release:
                assert all(row.line for row in table.rows)
            if table.document in catalogue.published:
                assert all(row.dp and row.ga for row in table.rows)


def test_slips_stand_beside_the_published_figure(catalogue: Catalogue) -> None:
    recipe = resolve(
        catalogue, Request(workload="pretrain_llama3.1", size="405b", scale=2304, dtype="fp8", release="24.11")
    )
    (expectation,) = recipe.expectations
    assert expectation.step_time_s == 12.35
    assert any("11.20" in note for note in expectation.notes)
    assert (recipe.model.kv_heads, recipe.model.vocab_size) == (16, 51_200)
    assert recipe.published_flops is not None
    assert recipe.published_flops.as_published == {"vocab_size": 128_256}


@pytest.mark.parametrize(
    ("gpus", "configured", "document"),
    [(32, 1.2419e15, 1.3040e15), (96, 3.6432e15, 3.7053e15), (192, 7.2452e15, 7.3073e15), (576, 2.1653e16, 2.17e16)],
)
def test_405b_of_the_first_release_is_the_model_that_ran(
    catalogue: Catalogue, gpus: int, configured: float, document: float
) -> None:
    """FLOPs of its configuration, and those that its document counts with the vocabulary of a later release."""
    request = Request(workload="pretrain_llama3.1", size="405b", scale=gpus, release="24.11")
    recipe = resolve(catalogue, request)
    assert flops_per_sequence(recipe, Convention.FULL) == pytest.approx(configured, rel=1e-4)
    assert flops_per_sequence(recipe, Convention.PUBLISHED) == pytest.approx(document, rel=1e-4)
    later = resolve(catalogue, Request(workload="pretrain_llama3.1", size="405b", scale=512))
    assert (later.model.kv_heads, later.size, recipe.size) == (8, "405b", "405b")


def test_340b_runs_virtual_stages_though_its_table_prints_none(catalogue: Catalogue) -> None:
    recipe = resolve(catalogue, Request(workload="pretrain_nemotron4", size="340b", scale=256))
    assert recipe.layout.vp == 12
    assert any("VP as NA" in note for note in recipe.notes)


@pytest.mark.parametrize("size", ["8b", "70b", "405b"])
def test_released_tables_win_over_older_ones(catalogue: Catalogue, size: str) -> None:
    assert resolve(catalogue, Request(workload="pretrain_llama3.1", size=size)).release == "25.04"


def test_every_size_has_a_tiny_sister_and_fits_one_gpu_whole_or_as_a_proxy(catalogue: Catalogue) -> None:
    for workload in catalogue.workloads.values():
        sizes = {table.size for table in workload.layouts if catalogue.is_trainable(workload, table.size)}
        assert "tiny" in sizes or not sizes
        for size in (size for size in sizes if not is_tiny(size)):
            for gpu_type in catalogue.gpus:
                recipe = resolve(catalogue, Request(workload=workload.workload, size=size, scale=1, gpu_type=gpu_type))
                assert recipe.proxy is ((workload.workload, size) not in FIT_ONE_GPU)
                assert recipe.layout.dp == 1


def one_gpu_bytes(catalogue: Catalogue, name: str, size: str, gpu_type: str) -> float:
    """Estimated bytes of a one-GPU proxy without recomputation (estimated, not measured).

    18 bytes a trained parameter (fp32 master, gradient and two moments, and a bf16 copy), 2 a frozen one; activations
    in bf16 of 8 hidden vectors and 3 (squared ReLU) or 4 (gated) FFN vectors a token and layer; logits in bf16 and
    twice fp32.
    """
    workload = catalogue.workloads[name]
    table = next(t for t in workload.layouts if t.size == size and t.rows[0].gpus == 1 and gpu_type in t.gpu_types)
    row = table.rows[0]
    model = model_of(catalogue.models[(workload.model, size)], table, row)
    layout = layout_of(table, row)
    total, _ = parameter_count(model)
    tokens = layout.mbs * layout.seq_len
    ffn = model.ffn_hidden_size * (4 if model.mlp == "swiglu" else 3)
    activations = 2 * tokens * model.layers * (8 * model.hidden_size + ffn)
    return total * (2 if workload.task == "lora" else 18) + activations + 10 * tokens * model.vocab_size


@pytest.mark.parametrize("gpu_type", ["h100", "h200"])
def test_one_gpu_proxies_fit_and_fill_their_gpu(catalogue: Catalogue, gpu_type: str) -> None:
    memory = catalogue.gpus[gpu_type].memory_gb * 1e9
    for name, workload in catalogue.workloads.items():
        for size in {one.size for one in workload.layouts if catalogue.is_trainable(workload, one.size)}:
            if is_tiny(size):
                continue
            share = one_gpu_bytes(catalogue, name, size, gpu_type) / memory
            assert 0.4 < share < 0.95, (name, size, share)

# SPDX-License-Identifier: Apache-2.0
"""What the engine comparison decides without running anything."""

from pathlib import Path

import pytest
from benchmarks.engine.cases import GPU_MODELS, Case
from benchmarks.engine.engines.job import Measured
from benchmarks.engine.kernels import with_shares
from benchmarks.engine.processes import Ended
from benchmarks.engine.published import find_target
from benchmarks.engine.records import CaseResult, Ceilings, Document, Settings, Verdict
from benchmarks.engine.run_case import blank, llmb_command, read_adapter
from benchmarks.engine.shapes import Floor, floor_of, job_of, request_of
from engine_comparison import CATALOGUE, SETTINGS, case_result, subject

from llmb.bench.device_bench import weights_of
from llmb.catalogue.records import Dtype
from llmb.metrics.throughput import model_flops

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [
        ("8b", Dtype.BF16, (62.47, 8, "h100")),
        ("8b", Dtype.FP8, (41.07, 8, "h100")),
        ("15b", Dtype.BF16, (66.07, 16, "h100")),
        ("405b", Dtype.BF16, (55.47, 512, "h100")),
        ("405b", Dtype.FP8, (44.35, 512, "h100")),
        ("maverick", Dtype.BF16, (10.47, 256, "b200")),
        ("maverick", Dtype.FP8, None),  # no figure is published
    ],
)
def test_the_target_is_the_whole_models_at_its_smallest_published_scale(name, dtype, target) -> None:
    found = subject(name, dtype).target
    assert (found and (found.mfu_pct, found.scale, found.gpu_type)) == target


@pytest.mark.parametrize(("compiled", "option"), [(True, "--compile"), (False, "--no-compile")])
def test_llmb_compiles_only_where_the_others_do(compiled, option) -> None:
    """On a GPU it would without being asked."""
    case = Case("llmb", subject("8b"))
    command = llmb_command(case, SETTINGS.model_copy(update={"compiled": compiled}))
    assert [word for word in command if word.endswith("compile")] == [option]


@pytest.mark.parametrize("name", GPU_MODELS)
def test_products_add_up_to_the_models_flops(name) -> None:
    recipe = subject(name).recipe
    products = sum(
        3 * 2 * weights.m * weights.k * weights.n * weights.count for weights in weights_of(recipe.model, recipe.layout)
    )
    full, causal = (model_flops(recipe.model, recipe.layout.seq_len, causal=causal) for causal in (False, True))
    without_attention = 2 * causal - full
    assert products == pytest.approx(recipe.layout.mbs * without_attention, rel=1e-12)


def test_the_floor_is_what_the_products_and_attention_take() -> None:
    recipe = subject("8b", Dtype.FP8).recipe
    request = request_of([recipe], "cuda", 1)
    measured = {
        "products": [
            {**shape, "seconds": 2.0 if shape["dtype"] == "bf16" else 1.0, "reason": None}
            for shape in request["products"]
        ],
        "sustained": [{**shape, "seconds": 1.25, "reason": None} for shape in request["sustained"]],
        "attention": [
            {**shape, "backend": backend, "backward": True, "seconds": seconds}
            for shape in request["attention"]
            for backend, seconds in (("flash", 0.5), ("cudnn", 0.25))
        ],
    }
    floor = floor_of("8b", recipe, measured)
    layers = recipe.layout.layers
    assert floor.products_s == 3 * (4 * layers * 1.0 + 2.0), "three passes; the head alone stays in bf16"
    assert (floor.attention_s, floor.attention_backend) == (0.25 * layers, "cudnn")
    assert floor.sustained == 0.8, "the largest product in FP8 takes 1.25 s in a loop, 1 s alone"


def test_what_is_sustained_is_measured_for_seconds() -> None:
    recipes = [subject("8b", dtype).recipe for dtype in (Dtype.BF16, Dtype.FP8)]
    job = job_of(request_of(recipes, "cuda", 1))
    loops = [case for case in job.cases if case.sustained_s is not None]
    assert [(case.work.dtype, case.sustained_s) for case in loops] == [("bf16", 2.0), ("fp8", 2.0)]
    assert {case.work.backend for case in job.cases if case.work.kind == "attention"} >= {"cudnn", "flash"}


def test_a_product_that_cannot_be_measured_leaves_the_floor_unknown() -> None:
    recipe = subject("8b").recipe
    request = request_of([recipe], "cuda", 1)
    products = [{**shape, "seconds": None, "reason": "no such kernel"} for shape in request["products"]]
    floor = floor_of("8b", recipe, {"products": products, "attention": [], "sustained": []})
    assert floor.products_s is None and "no such kernel" in floor.reason
    assert with_shares(case_result(), Ceilings(measured=None, floors=(floor,))).kernel_share_pct is None


def test_shares_set_a_step_against_the_kernels() -> None:
    floor = Floor(name="8b", dtype=Dtype.BF16, products_s=0.15, products_tflops=800.0, sustained=0.75,
                  attention_s=0.05, attention_backend="cudnn", reason=None)  # fmt: skip
    case = case_result(times=(0.9, 1.0, 1.1)).model_copy(update={"tflops": {"causal": 600.0}})
    found = with_shares(case, Ceilings(measured=None, floors=(floor,)))
    assert found.kernel_share_pct == pytest.approx(80), "4 micro-batches of 0.2 s in a step of 1 s"
    assert found.product_share_pct == pytest.approx(75)
    assert found.sustained_share_pct == pytest.approx(100), "products take 0.2 s at three quarters of their rate"


def test_an_engine_whose_loss_is_not_finite_has_failed(tmp_path) -> None:
    """JSON has no such number: a result that is done could not be read again."""
    case = Case("huggingface", subject("8b"))
    parameters = blank(case).parameters
    measured = Measured(
        parameters=parameters, step_times_s=(1.0,) * 2, losses=(11.0, float("nan")), peak_memory_bytes=1, versions={},
        conventions=(),
    )  # fmt: skip
    (tmp_path / "result.json").write_text(measured.model_dump_json())
    found = read_adapter(case, blank(case), Ended(0, "", "", 1.0), tmp_path)
    assert (found.status, found.reason) == ("failed", "the loss of step 1 is not finite")


def test_the_page_lists_the_targets() -> None:
    """docs/explanation/engine-speed.md prints what is to be reached."""
    page = (ROOT / "docs" / "explanation" / "engine-speed.md").read_text()
    for name, (workload, size) in GPU_MODELS.items():
        for dtype in (Dtype.BF16, Dtype.FP8):
            found = find_target(CATALOGUE, workload, size, dtype)
            row = f"| {name} | {dtype} | n/a | n/a | n/a | n/a | not published |"
            if found:
                recounted = f"{found.mfu_pct_full:.2f} | {found.mfu_pct_causal:.2f}"
                source = f"{found.source.split(' (')[0]} line {found.line}"
                where = f"{found.scale} x {found.gpu_type}"
                row = f"| {name} | {dtype} | {found.mfu_pct} | {recounted} | {where} | {source} |"
            assert row in page


def test_the_page_names_every_key_of_the_document() -> None:
    page = (ROOT / "docs" / "how-to" / "compare-engines.md").read_text()
    for record in (Document, CaseResult, Settings, Verdict, Floor, Ceilings):
        missing = [name for name in record.model_fields if f"`{name}`" not in page]
        assert not missing, record.__name__

# SPDX-License-Identifier: Apache-2.0
"""Predictions from microbenchmarks: what was measured comes out again, and nothing else changes."""

import json
from pathlib import Path

import pytest

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.nodes.bench.calibration import calibrate_with_bench
from llmb.nodes.bench.device_bench import TimedCase, attention_cases, gemm_cases, meaning, memory_cases
from llmb.nodes.bench.measurements import Measurement, MeasurementFile, measurements_at
from llmb.nodes.bench.protocol import DeviceReport, Timing
from llmb.prediction.links import Links
from llmb.prediction.prediction import default_calibration, predict
from llmb.prediction.work import Messages
from llmb.reports.bench_report import measurement_document
from llmb.runs.choices import Choices, Replicas
from llmb.runs.plan import EnginePlan, make_plan

CATALOGUE = Catalogue()
H100, GPUS = CATALOGUE.gpus["h100"], CATALOGUE.gpus.values()
USUAL = default_calibration(CATALOGUE.rates)
DEVICE = "NVIDIA H100 80GB HBM3"


def planned(**sizes: int) -> EnginePlan:
    request = Request(
        workload="pretrain_llama3.1", size="8b", dtype="bf16", gpu_type="h100", scale=8, overrides=Overrides(**sizes)
    )
    return make_plan(resolve(CATALOGUE, request), Choices(), device="cuda")


def row(asked: TimedCase, seconds: float, device: str = DEVICE) -> Measurement:
    report = DeviceReport.model_construct(device=device, cpu_threads=1)
    found = meaning(asked, Timing(seconds=seconds, repeats=3), report, "n", H100, on_gpu=True)
    assert isinstance(found, Measurement)
    return found


def file(*rows: Measurement) -> MeasurementFile:
    return MeasurementFile(
        node="n", measured_at="2026-11-20T10:00:00+00:00", command=("llmb",), software={}, measurements=rows
    )


def test_what_was_printed_is_read_as_what_was_kept(tmp_path: Path) -> None:
    kept = file(row(next(memory_cases("cuda", (), 0.0)), 0.001))
    printed = tmp_path / "copies.json"
    printed.write_text(json.dumps(measurement_document(kept)))
    assert measurements_at(printed) == [kept]
    printed.write_text('{"kind": "something else"}')
    assert measurements_at(printed) == []


def products(plan: EnginePlan, tflops: float, sustained: float = 0.0) -> list[Measurement]:
    """Each at the same rate, and the one that is sustained, if any, at another."""
    cases = gemm_cases(plan.recipe, ("bf16",), "cuda", sustained)
    return [row(each, (each.flops or 0) / (sustained if each.case.sustained_s else tflops) / 1e12) for each in cases]


def collective(case: str, size: int, gb_per_s: float, **other: object) -> Measurement:
    found = {"shape": "out of place", "dtype": "fp32", "ranks": 8, "size_bytes": size, "time_s": size / gb_per_s / 1e9}
    figures = {"repetitions": 20, "bus_bandwidth_gb_per_s": gb_per_s, "node": "n", "device": DEVICE}
    return Measurement.model_validate({"benchmark": "collectives", "case": case, **found, **figures, **other})


def terms(plan: EnginePlan, *files: MeasurementFile) -> dict[str, float]:
    found = calibrate_with_bench(files, plan, H100, GPUS, USUAL) if files else USUAL
    return dict(predict(plan, H100, found, CATALOGUE.rates.errors).terms)


def changed(plan: EnginePlan, *files: MeasurementFile) -> set[str]:
    usual, found = terms(plan), terms(plan, *files)
    return {name for name in usual if found[name] != pytest.approx(usual[name], rel=1e-9)}


def test_products_take_as_long_as_was_measured_with_what_they_write() -> None:
    plan = planned()
    layout, tflops = plan.recipe.layout, 600.0
    cases = [each for each in gemm_cases(plan.recipe, ("bf16",), "cuda", 0) if not each.label.startswith("square")]
    found = terms(plan, file(*products(plan, tflops)))
    measured = layout.ga * sum(each.weight for each in cases) / tflops / 1e12
    # Sums of weights' gradients are read and written, which a product alone is not.
    sums = sum(each.weight / (2 * 4096) * 2 for each in cases if "wgrad" in each.label and "logits" not in each.label)
    beside = sums * USUAL.rates["written"] / H100.memory_bandwidth_tb_s / 1e12 * layout.ga
    assert found["products bf16"] + found["outputs of products"] == pytest.approx(measured + beside, rel=1e-9)
    assert changed(plan, file(*products(plan, tflops))) == {"products bf16"}


def test_a_shape_has_its_own_time_and_others_that_of_all() -> None:
    plan = planned()
    rows = products(plan, 600.0)
    slow = [each.model_copy(update={"time_s": 2 * each.time_s}) if each.case == "down_dgrad" else each for each in rows]
    cases = {each.label: each for each in gemm_cases(plan.recipe, ("bf16",), "cuda", 0)}
    more = plan.recipe.layout.ga * cases["down_dgrad"].weight / 600e12
    difference = terms(plan, file(*slow))["products bf16"] - terms(plan, file(*rows))["products bf16"]
    assert difference == pytest.approx(more, rel=1e-6)
    other = planned(mbs=2)
    assert 0 < terms(other, file(*slow))["products bf16"] / terms(other, file(*rows))["products bf16"] - 1 < 0.2


def test_what_lasts_for_seconds_slows_bursts_down() -> None:
    plan = planned()
    burst, lasting = (terms(plan, file(*products(plan, 600.0, sustained))) for sustained in (0.0, 500.0))
    written = "outputs of products"
    assert (lasting["products bf16"] + lasting[written]) / (burst["products bf16"] + burst[written]) == pytest.approx(
        1.2, abs=0.01
    )


def test_attention_memory_and_links_are_as_measured() -> None:
    plan = planned(tp=2)
    attention = [row(each, (each.flops or 0) / 300e12) for each in attention_cases(plan.recipe, (), 0)]
    assert terms(plan, file(*attention))["attention"] == pytest.approx(
        terms(plan)["attention"] * 989 / 300 / USUAL.rates["attention"]
    )
    copies = [row(each, (each.moved_bytes or 0) / 1e12) for each in memory_cases("cuda", (), 0)]
    part = H100.memory_bandwidth_tb_s / USUAL.rates["memory"]
    ratios = {name: terms(plan, file(*copies))[name] / terms(plan)[name] for name in changed(plan, file(*copies))}
    assert ratios == pytest.approx({"memory-bound operators": part, "outputs of products": part})
    large = [collective("all_gather", 2**30, 225.0), collective("all_gather", 2**20, 1.0)]
    links = terms(plan, file(*large))["tensor-parallel messages"] / terms(plan)["tensor-parallel messages"]
    assert 1.2 < links < 2, "half of the bandwidth, in one of two directions"
    assert "dp" not in changed(plan, file(*large))


def test_the_interval_is_no_narrower_and_says_what_was_not_checked() -> None:
    plan = planned()
    found = calibrate_with_bench([file(*products(plan, 600.0))], plan, H100, GPUS, USUAL)
    prediction, usual = (predict(plan, H100, each, CATALOGUE.rates.errors) for each in (found, USUAL))
    assert prediction.error_pct > usual.error_pct
    assert "llmb bench" in prediction.unvalidated[0]
    assert found.text.startswith("llmb bench on n: 15 products bf16 at 600 TFLOP/s; ")


def test_an_exchange_of_experts_takes_as_long_as_was_measured() -> None:
    request = Request(workload="pretrain_mixtral", size="8x7b", dtype="bf16", gpu_type="h100", scale=64)
    plan = make_plan(resolve(CATALOGUE, request), Choices(), device="cuda")
    layout, model = plan.recipe.layout, plan.recipe.model
    assert (layout.ep, layout.etp, layout.tp, layout.cp) == (8, 1, 1, 1) and model.moe
    size = 2 * layout.mbs * layout.seq_len * model.hidden_size * model.moe.top_k

    def exchanges(*rows: Measurement) -> float:
        machine = calibrate_with_bench([file(*rows)], plan, H100, GPUS, USUAL).machine
        assert machine
        links = Links(layout, Replicas(), H100, 1.0, 1.0, machine.links, (), machine.exchanges)
        return links.travel(Messages("all_to_all", "ep", 2, float(size)))

    slow, large = collective("alltoall", size, 100.0, time_s=0.5), collective("alltoall", 2**30, 200.0)
    assert exchanges(slow) == exchanges(slow, large) == 2 * 0.5
    assert exchanges(large) == exchanges(large, slow.model_copy(update={"ranks": 4})) < 0.1
    assert "messages of experts" in changed(plan, file(slow))
    halves = plan.model_copy(update={"communication": "halves"})
    half = slow.model_copy(update={"size_bytes": size // 2})
    texts = [calibrate_with_bench([file(large, row)], halves, H100, GPUS, USUAL).text for row in (slow, half)]
    assert ["exchange of" in text for text in texts] == [False, True]


def test_the_newest_measurement_of_a_case_counts() -> None:
    plan = planned()
    old, new = (file(*products(plan, tflops)) for tflops in (400.0, 600.0))
    assert terms(plan, old, new) == terms(plan, new)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([collective("all_gather", 2**30, 200.0, device="AMD EPYC")], "measured AMD EPYC, but the prediction is for"),
        ([collective("all_gather", 2**30, 200.0, device="NVIDIA B200")], "measured NVIDIA B200, but the prediction is"),
        ([collective("all_gather", 2**20, 200.0)], "contains no measurement that predictions use"),
        ([collective("all_gather", 2**30, 20.0, ranks=16)], "contains no measurement that predictions use"),
        (
            [collective("all_gather", 2**30, 20.0, shape="out of place, 2 nodes")],
            "contains no measurement that predictions",
        ),
        (
            [each.model_copy(update={"time_s": 1e-9}) for each in products(planned(), 600.0)],
            "less time than writing its result",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(rows: list[Measurement], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        calibrate_with_bench([file(*rows)], planned(), H100, GPUS, USUAL)

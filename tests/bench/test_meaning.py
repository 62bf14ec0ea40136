# SPDX-License-Identifier: Apache-2.0
"""What timings mean: rates, shares of peaks that are known, changes since the measurement before."""

import pytest

from llmb.bench.device_bench import TimedCase, meaning, memory_cases
from llmb.bench.measurements import Measurement, MeasurementFile, NotMeasured, changes
from llmb.bench.protocol import Case, DeviceReport, LaunchCase, Timing
from llmb.catalogue.load import Catalogue

GPUS = Catalogue().gpus
H100 = DeviceReport(python="3.12", torch="2.13", cuda="13.0", cudnn="9.10.2", cudnn_number=91002, nccl="2.28",
                    driver="580", device="NVIDIA H100 80GB HBM3", device_memory_gib=80.0, cpu_threads=8)  # fmt: skip
CASE = Case(name="any", work=LaunchCase(way="host"))
PRODUCT = TimedCase("gemm", "qkv_forward", CASE, shape="1 x 1 x 1", dtype="bf16", flops=989e12)


def row(asked=PRODUCT, seconds=2.0, gpu="h100", report=H100, on_gpu=True):
    return meaning(asked, Timing(seconds=seconds, repeats=3), report, "node-1", GPUS.get(gpu), on_gpu=on_gpu)


def test_a_products_rate_is_compared_with_the_peak_of_its_dtype() -> None:
    found = row()
    assert found.tflops == pytest.approx(989 / 2) and found.peak_tflops == 989
    assert found.peak_pct == pytest.approx(50)
    assert (found.cpu_threads, found.peak_reason) == (None, None)


def test_a_copys_rate_is_compared_with_the_memorys() -> None:
    (asked,) = memory_cases("cuda", (10**9,), 0)
    found = row(asked, seconds=1e-3)
    assert found.bandwidth_gb_per_s == pytest.approx(2000), "read and written"
    assert found.peak_pct == pytest.approx(100 * 2000 / 3350)


@pytest.mark.parametrize(
    ("dtype", "gpu", "reason"),
    [
        ("fp16", "h100", "the catalogue has no fp16 peak of h100"),
        ("bf16", "", "the catalogue has no peak of NVIDIA H100 80GB HBM3"),
    ],
)
def test_an_unknown_peak_has_a_reason(dtype, gpu, reason) -> None:
    found = row(TimedCase("gemm", "qkv_forward", CASE, dtype=dtype, flops=1e12), gpu=gpu)
    assert (found.peak_tflops, found.peak_pct, found.peak_reason) == (None, None, reason)


def test_a_launch_has_no_peak_and_needs_no_reason() -> None:
    found = row(TimedCase("launch", "host", CASE))
    assert (found.tflops, found.bandwidth_gb_per_s, found.peak_reason) == (None, None, None)


def test_what_has_no_time_has_a_reason() -> None:
    timing = Timing(seconds=None, reason="it needs 9 GB", out_of_memory=True)
    found = meaning(PRODUCT, timing, H100, "node-1", None, on_gpu=True)
    assert isinstance(found, NotMeasured)
    assert (found.shape, found.reason, found.out_of_memory) == ("1 x 1 x 1", "it needs 9 GB", True)


def file(minute, *rows, node="node-1"):
    moved = tuple(one.model_copy(update={"node": node}) for one in rows)
    return MeasurementFile(node=node, measured_at=f"2026-11-22T10:{minute:02}:00+00:00", command=("llmb",),
                           software={}, measurements=moved)  # fmt: skip


def test_a_change_is_against_the_measurement_before_of_the_same_case() -> None:
    slow, fast, other = row(seconds=2.0), row(seconds=1.6), row(seconds=9.0)
    sustained = other.model_copy(update={"sustained": True})
    found = changes([file(1, row(seconds=5.0)), file(2, slow, sustained), file(3, fast)])
    assert [(change.latest.time_s, change.previous and change.previous.time_s) for change in found] == [
        (1.6, 2.0), (9.0, None)]  # fmt: skip
    assert found[0].speed_pct == pytest.approx(25)
    assert found[1].speed_pct is None


def test_nodes_and_devices_are_not_compared_with_each_other() -> None:
    other_device = row().model_copy(update={"device": "NVIDIA B200"})
    found = changes([file(1, row()), file(2, row(), node="node-2"), file(3, other_device)])
    assert len(found) == 3 and not any(change.previous for change in found)
    assert changes([file(1, row())], "memory") == []
    assert isinstance(found[0].latest, Measurement)

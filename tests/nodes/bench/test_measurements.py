# SPDX-License-Identifier: Apache-2.0
"""What timings mean: rates, shares of peaks that are known, changes since before, which of equal devices is slow."""

import random

import pytest
from shown_tables import shown_lines

from llmb.catalogue.catalogue import Catalogue
from llmb.nodes.bench.device_bench import TimedCase, meaning, memory_cases
from llmb.nodes.bench.measurements import Measurement, MeasurementFile, NotMeasured, changes
from llmb.nodes.bench.protocol import Case, DeviceReport, LaunchCase, Timing
from llmb.nodes.bench.slow_gpus import (
    OutlierRule,
    below_median_pct,
    compare_parts,
    gpus_document,
    outlier_rule,
    slow_ones,
)
from llmb.reports.bench_report import advice, gpus_tables
from llmb.reports.table import plain_lines

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
        ("fp16", "h100", "the catalogue has no fp16 peak for h100"),
        ("bf16", "", "the catalogue has no peak for NVIDIA H100 80GB HBM3"),
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


RULE = outlier_rule()


def test_a_device_has_to_be_far_from_the_others_and_noticeably_slower() -> None:
    close = [100.0, 100.1, 99.9, 100.2, 99.8, 100.0, 100.1]
    assert slow_ones([*close, 94.0], RULE) == [7]
    assert slow_ones([*close, 95.5], RULE) == []  # more than 3 deviations, but nobody would notice
    scattered = [100, 112, 90, 105, 84, 118, 96.0]
    assert slow_ones([*scattered, 75.0], RULE) == []  # not further than these scatter
    assert slow_ones([*scattered, 20.0], RULE) == [7]
    assert slow_ones([*close, 150.0], RULE) == []  # a fast one is no fault


def test_of_two_that_differ_none_is_named() -> None:
    assert slow_ones([100.0, 50.0], RULE) == []
    assert slow_ones([100.0, 100.0, 50.0], RULE) == [2]


def test_the_distance_is_that_from_the_median() -> None:
    assert below_median_pct([90.0, 100.0, 120.0]) == pytest.approx([10.0, 0.0, -20.0])


@pytest.mark.parametrize(("devices", "noise_pct"), [(8, 0.5), (8, 1.0), (64, 1.0), (512, 1.0)])
def test_identical_devices_are_not_called_slow(devices, noise_pct) -> None:
    """Of GPUs that differ by 1 % (one standard deviation), none of 50,000 is called slow."""
    draw = random.Random(7)
    groups = ([draw.gauss(100, noise_pct) for _ in range(devices)] for _ in range(50_000 // devices))
    assert not any(slow_ones(speeds, RULE) for speeds in groups)


@pytest.mark.parametrize(("devices", "noise_pct", "most"), [(8, 2.0, 0.03), (8, 10.0, 0.08), (64, 2.0, 0.03)])
def test_false_alarms_stay_rare_where_devices_scatter_widely(devices, noise_pct, most) -> None:
    """The share of groups with one; 5 % alone would give 5 % of groups of 8 one at 2 % noise, and all at 10 %."""
    draw = random.Random(7)
    groups = 16_000 // devices
    alarms = sum(bool(slow_ones([draw.gauss(100, noise_pct) for _ in range(devices)], RULE)) for _ in range(groups))
    assert alarms / groups < most


def file_of(node, *speeds, device="GPU A", failed=()):
    rows = tuple(
        Measurement(
            benchmark="gpus", case="square", shape="8 x 8 x 8", dtype="bf16", node=node, device=device, rank=rank,
            time_s=1 / speed, repetitions=3, tflops=speed, device_uuid=f"GPU-{node}-{rank}",
        )
        for rank, speed in enumerate(speeds)
    )  # fmt: skip
    missing = tuple(NotMeasured(benchmark="gpus", case=f"local rank {rank}", reason="lost") for rank in failed)
    return MeasurementFile(
        node=node, measured_at="2026-01-01T00:00:00Z", command=(), software={}, measurements=rows, not_measured=missing
    )


def test_slow_failed_and_silent_nodes_are_named_for_exclusion() -> None:
    files = [file_of("a", 700, 701, 699), file_of("b", 700, 600, 702), file_of("c", 701, 700, failed=[2])]
    parts = compare_parts(files, ["d"], RULE)
    (slow,) = parts.slow
    assert (slow.row.node, slow.row.rank, slow.row.device_uuid) == ("b", 1, "GPU-b-1")
    assert parts.unfit_nodes == ["b", "c", "d"]
    document = gpus_document(parts, RULE)
    assert document["exclude"] == "b,c,d" and document["rule"] == {"sigmas": 4, "below_pct": 5, "least_devices": 3}
    assert [one["local_rank"] for one in document["devices"] if one["slow"]] == [1]
    assert "llmb submit --exclude b,c,d" in (advice(parts) or "")
    text = "\n".join(shown_lines(gpus_tables(parts, RULE)))
    assert "SLOW" in text and "GPU-b-1" in text and "the node reported nothing" in text


def test_devices_of_different_names_are_not_compared() -> None:
    files = [file_of("a", 700, 701, 699), file_of("b", 300, 301, 299, device="GPU B")]
    assert compare_parts(files, [], RULE).unfit_nodes == []


def test_of_many_devices_only_the_slow_ones_are_listed() -> None:
    files = [file_of(f"n{number}", *[700] * 8) for number in range(20)] + [file_of("bad", 500, *[700] * 7)]
    parts = compare_parts(files, [], RULE)
    (table,) = gpus_tables(parts, RULE)
    text = "\n".join(plain_lines(table))
    assert "168 devices" in text and text.count("GPU-") == 1 and "GPU-bad-0" in text
    assert advice(compare_parts(files[:20], [], RULE)) is None


def test_the_rule_is_data() -> None:
    assert slow_ones([100.0, 100.0, 97.0], OutlierRule(sigmas=3, below_pct=2, least_devices=3)) == [2]

# SPDX-License-Identifier: Apache-2.0
"""Which of many equal devices is called slow, and how often one is by chance."""

import random

import pytest
from shown_tables import shown_lines

from llmb.bench.gpus import OutlierRule, below_median_pct, compare_parts, outlier_rule, slow_ones
from llmb.bench.measurements import Measurement, MeasurementFile, NotMeasured
from llmb.report.bench_report import advice, gpus_document, gpus_tables
from llmb.report.table import plain_lines

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

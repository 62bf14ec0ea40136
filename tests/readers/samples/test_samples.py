# SPDX-License-Identifier: Apache-2.0
"""Samples of a run as figures of its window."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.missing import Missing
from llmb.readers.samples.sample_records import GpuSamples, HostSample, ResourceUse, Sample, SampledGpu, SamplerStart
from llmb.readers.samples.samples import (
    NOT_COVERED,
    NOT_REPORTED,
    Sampled,
    SampledWork,
    TimeSpan,
    integral,
    length,
    merged,
    places_inside,
    rise,
    summarize,
)

GPUS = (SampledGpu(index=0, uuid="GPU-a"), SampledGpu(index=1, uuid="GPU-b"))
WORK = SampledWork(spans=(TimeSpan(12, 14), TimeSpan(14, 16)), tokens=1000, device="cuda", nodes=("n1",))
GIB = 2**30


def sampled(node: str = "n1", *, counters: bool = True, first_s: float = 10, **missing: str) -> Sampled:
    """Twelve samples, one a second. GPU 0 draws 600 W from second 13 on and 200 W before, GPU 1 always 300 W."""
    return Sampled(
        SamplerStart(node=node, cores=4, interval_s=1.0, gpus=GPUS, missing=missing),
        tuple(sample(first_s + number, counters=counters) for number in range(12)),
    )


def sample(time_s: float, *, counters: bool) -> Sample:
    busy = time_s >= 13
    return Sample(
        time_s=time_s,
        host=HostSample(
            cpu_busy_s=100 + 3 * time_s,
            cpu_iowait_s=0.4 * time_s,
            cpu_steal_s=0.0,
            cpu_total_s=4 * time_s,
            load=2.0,
            memory_used_bytes=int(8 + time_s) * GIB,
            worker_memory_bytes=GIB,
            cpu_energy_j=50 * time_s,
        ),
        gpus=GpuSamples(
            power_w=(600.0 if busy else 200.0, 300.0),
            energy_j=(550 * time_s, 250 * time_s) if counters else (None, None),
            sm_clock_mhz=(1500.0 if busy else 1900.0, 1980.0),
            temperature_c=(70.0, 60.0),
            memory_used_bytes=(60 * GIB, None),
            throttle_reasons=(("sw_power_cap",) if busy else (), ()),
        ),
    )


def use(work: SampledWork = WORK, *runs: Sampled) -> ResourceUse:
    found = summarize(runs or (sampled(),), work)
    assert isinstance(found, ResourceUse), found
    return found


def test_only_the_steps_of_the_window_count() -> None:
    found = use()
    assert found.samples == 5
    first, second = found.gpus or ()
    assert (first.power_w_mean, first.power_w_max) == (pytest.approx((200 + 4 * 600) / 5), 600)
    assert (second.power_w_mean, second.energy_j) == (300, pytest.approx(250 * 4))
    assert (first.sm_clock_mhz_mean, first.sm_clock_mhz_min) == (pytest.approx((1900 + 4 * 1500) / 5), 1500)
    assert first.throttled == {"sw_power_cap": 0.8}
    assert second.throttled == {}
    assert found.throttled == {"sw_power_cap": 0.4}
    assert found.power_w_mean == pytest.approx((520 + 300) / 2)
    assert (found.energy_j, found.energy_source) == (pytest.approx(800 * 4), "gpu_counter")
    assert found.energy_j_per_token == pytest.approx(3.2)
    assert found.total_power_w_mean == pytest.approx(800)
    assert (found.temperature_c_max, found.memory_used_gib_max, found.sm_clock_mhz_min) == (70, 60, 1500)
    (host,) = found.hosts
    assert (host.cpu_pct_mean, host.iowait_pct_mean, host.steal_pct_mean) == (pytest.approx(75), pytest.approx(10), 0)
    assert (host.memory_used_gib_max, host.worker_memory_gib_max) == (24, 1)
    assert host.cpu_energy_j == pytest.approx(200)
    assert found.reasons == {"gpus.memory_used_gib_max": NOT_REPORTED}


def test_time_between_steps_is_left_out() -> None:
    found = use(replace(WORK, spans=(TimeSpan(12, 13), TimeSpan(20, 21))))
    assert found.samples == 4
    assert found.energy_j == pytest.approx(1600)


def test_without_counters_energy_is_the_integral_of_power() -> None:
    found = use(WORK, sampled(counters=False))
    assert found.energy_source == "gpu_power"
    # GPU 0 rises from 200 W at second 12 to 600 W at second 13.
    assert found.energy_j == pytest.approx(400 + 3 * 600 + 4 * 300)


def test_only_the_gpus_of_the_run_count() -> None:
    found = use(replace(WORK, gpus={"n1": {"GPU-b"}}))
    assert [gpu.index for gpu in found.gpus or ()] == [1]
    assert found.energy_j == pytest.approx(1000)


def test_a_run_on_cpus_has_the_energy_of_its_packages() -> None:
    one = sampled(gpus="the run is on a CPU")
    one = Sampled(replace(one.start, gpus=()), tuple(replace(each, gpus=None) for each in one.samples))
    found = use(replace(WORK, device="cpu"), one)
    assert (found.energy_j, found.energy_source) == (pytest.approx(200), "cpu_package")
    assert found.gpus is None and found.power_w_mean is None
    assert set(found.reasons.values()) == {"the run is on a CPU"}
    assert found.reasons["power_w_mean"]


def test_energy_of_a_part_of_the_run_is_not_given() -> None:
    found = use(replace(WORK, nodes=("n1", "n2")))
    assert found.energy_j is None and found.energy_j_per_token is None
    assert found.reasons["energy_j"] == "not all GPUs and nodes were sampled: n2"
    found = use(replace(WORK, gpus={"n1": {"GPU-a", "GPU-gone"}}))
    assert found.energy_j is None
    both = use(replace(WORK, nodes=("n1", "n2")), sampled("n2"), sampled("n1"))
    assert both.energy_j == pytest.approx(6400)
    assert [host.node for host in both.hosts] == ["n1", "n2"]


def test_without_nvml_the_reason_for_no_energy_is_that() -> None:
    work = replace(WORK, gpus={"n1": {"GPU-a"}})
    blind = sampled(gpus="nvidia-ml-py is not installed")
    found = use(work, replace(blind, start=replace(blind.start, gpus=())))
    assert found.reasons["energy_j"] == found.reasons["power_w_mean"] == "nvidia-ml-py is not installed"


def test_a_window_that_the_samples_do_not_cover() -> None:
    found = use(replace(WORK, spans=(TimeSpan(5, 12),)))
    assert found.energy_j is None and found.hosts[0].cpu_pct_mean is None
    assert found.reasons["energy_j"] == found.reasons["hosts.cpu_pct_mean"] == NOT_COVERED
    assert found.gpus and found.gpus[0].power_w_mean == 200
    assert found.reasons["gpus.energy_j"] == NOT_COVERED


def test_of_a_restarted_run_the_sampler_that_saw_the_window() -> None:
    found = use(WORK, sampled(first_s=0), sampled(), sampled(first_s=500))
    assert found.samples == 5
    assert found.energy_j == pytest.approx(3200)


@pytest.mark.parametrize(
    ("runs", "spans", "reason"),
    [
        ((), (TimeSpan(1, 2),), "the run folder has no samples"),
        (
            (sampled(),),
            (TimeSpan(12.2, 12.4),),
            "no sample in the 0.2 s of the window's steps; --resource-interval is 1 s",
        ),
        ((sampled(),), (TimeSpan(50, 60),), "the samples end before the window's steps"),
    ],
)
def test_without_a_sample_there_is_a_reason(runs: tuple[Sampled, ...], spans: Any, reason: str) -> None:
    assert summarize(runs, replace(WORK, spans=spans)) == Missing(reason)


def test_every_figure_that_is_none_has_a_reason() -> None:
    bare = Sampled(
        SamplerStart(node="n1", cores=None, interval_s=1.0, missing={"gpus": "no package", "cpu_energy": "no file"}),
        tuple(Sample(time_s=time, host=HostSample()) for time in (11.0, 13.0, 17.0)),
    )
    found = use(WORK, bare)
    none = [name for name, value in found if value is None]
    none += [f"hosts.{name}" for name, value in found.hosts[0] if value is None]
    assert sorted(found.reasons) == sorted(none)
    assert found.reasons["energy_j"] == found.reasons["gpus"] == "no package"
    assert found.reasons["hosts.cpu_energy_j"] == "no file"


POINTS = [(0.0, 0.0), (1.0, 10.0), (2.0, 10.0), (4.0, 30.0)]


def test_spans_that_touch_are_one() -> None:
    assert merged([TimeSpan(3, 4), TimeSpan(0, 1), TimeSpan(1, 2), TimeSpan(0.5, 1.5)]) == (
        TimeSpan(0, 2),
        TimeSpan(3, 4),
    )
    assert length(merged([TimeSpan(3, 4), TimeSpan(0, 1), TimeSpan(1, 2)])) == 3


def test_which_samples_lie_in_spans() -> None:
    assert places_inside([0.0, 1.0, 2.0, 3.0, 4.0], [TimeSpan(0.5, 2.0), TimeSpan(3.5, 9)]) == [1, 2, 4]
    assert places_inside([0.0, 5.0], [TimeSpan(1, 2)]) == []


def test_a_counter_rises_between_its_points() -> None:
    assert rise(POINTS, [TimeSpan(0, 4)]) == 30
    assert rise(POINTS, [TimeSpan(0.5, 1.5)]) == 5
    assert rise(POINTS, [TimeSpan(0, 1), TimeSpan(3, 4)]) == 20
    assert rise(POINTS, [TimeSpan(-1, 1)]) is None
    assert rise(POINTS, [TimeSpan(3, 4.1)]) is None
    assert rise([], [TimeSpan(0, 1)]) is None


def test_the_integral_of_power_is_energy() -> None:
    assert integral([(0.0, 100.0), (1.0, 200.0), (3.0, 200.0)]) == [(0.0, 0.0), (1.0, 150.0), (3.0, 550.0)]


@given(st.lists(st.floats(0, 99), min_size=1, max_size=6))
def test_parts_rise_as_much_as_the_whole(cuts: list[float]) -> None:
    points = [(0.0, 1.0), (30.0, 7.0), (70.0, 7.5), (100.0, 50.0)]
    ends = [0.0, *sorted(cuts), 100.0]
    parts = [rise(points, [TimeSpan(*pair)]) for pair in pairwise(ends)]
    assert sum(part or 0.0 for part in parts) == pytest.approx(49.0)

# SPDX-License-Identifier: Apache-2.0
"""What is read of GPUs: with a stand-in for NVML's package, and of real ones."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from llmb.base.missing import Missing
from llmb.readers.samples.nvml import NO_PACKAGE, Nvml, find_gpus
from llmb.readers.samples.sample_records import GpuSamples, SampledGpu


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.delitem(sys.modules, "fake_pynvml", raising=False)
    fake = importlib.import_module("fake_pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_what_two_gpus_tell(pynvml: ModuleType) -> None:
    gpus = find_gpus()
    assert isinstance(gpus, Nvml)
    assert gpus.gpus == (SampledGpu(index=0, uuid="GPU-0"), SampledGpu(index=1, uuid="GPU-1"))
    assert gpus.read() == GpuSamples(
        power_w=(500.0, 400.0),
        energy_j=(2000.0, None),
        sm_clock_mhz=(1980.0, 1680.0),
        temperature_c=(60.0, 61.0),
        memory_used_bytes=(64 << 30, None),
        throttle_reasons=((), ("sw_power_cap", "sw_thermal_slowdown")),
        other_pids=(None, None),
    )
    assert gpus.read().power_w == (700.0, 400.0)


def test_counters_of_errors(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = find_gpus()
    assert isinstance(gpus, Nvml)
    assert dict(gpus.counters()) == {
        "0/ecc_uncorrected": 0,
        "0/nvlink_replays": 7,
        "0/pcie_replays": 5,
        "1/ecc_uncorrected": 2,
        "1/pcie_replays": 5,
    }
    monkeypatch.delattr(pynvml, "nvmlDeviceGetFieldValues")
    with pytest.raises(OSError, match="NVML has no error counters"):
        dict(gpus.counters())


def test_what_a_gpu_does_not_support_is_asked_once(pynvml: ModuleType) -> None:
    gpus = find_gpus()
    assert isinstance(gpus, Nvml)
    for _ in range(5):
        gpus.read()
    assert pynvml.calls["energy of GPU 1"] == 1


def test_other_processes_are_known_where_the_own_ones_are(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a container the driver may tell ids of the host."""
    told = [[SimpleNamespace(pid=10), SimpleNamespace(pid=30)], [SimpleNamespace(pid=11)]]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", told.__getitem__, raising=False)
    gpus = find_gpus()
    assert isinstance(gpus, Nvml)
    assert gpus.read({10, 11}).other_pids == ((30,), ())
    assert gpus.read({77}).other_pids == (None, None)
    assert gpus.processes() == ((10, 30), (11,))


def test_newer_names_of_a_function_are_preferred(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: 0x80, raising=False)
    gpus = find_gpus()
    assert isinstance(gpus, Nvml)
    assert gpus.read().throttle_reasons == (("hw_power_brake_slowdown",),) * 2


def test_without_a_driver_there_is_a_reason(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert find_gpus() == Missing("NVML: Driver Not Loaded")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    assert find_gpus() == Missing("NVML finds no GPU")


def test_without_the_package_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus() == NO_PACKAGE


@pytest.mark.gpu
@pytest.mark.slow
def test_what_real_gpus_tell(needs: Callable[..., None]) -> None:
    gpus = find_gpus()
    needs("gpu", isinstance(gpus, Nvml), str(gpus))
    assert isinstance(gpus, Nvml)
    seen = gpus.read()
    assert all(gpu.uuid.startswith("GPU-") for gpu in gpus.gpus)
    assert all(power is not None and 5 < power < 3000 for power in seen.power_w)
    assert all(clock is not None and 100 < clock < 4000 for clock in seen.sm_clock_mhz)
    assert all(temperature is not None and 5 < temperature < 120 for temperature in seen.temperature_c)
    assert all(reasons is not None for reasons in seen.throttle_reasons)

# SPDX-License-Identifier: Apache-2.0
"""Reads the GPUs of this node with NVML, if its Python package nvidia-ml-py is installed."""

import errno
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from typing import Any, TypeVar

from llmb.base.missing import Missing
from llmb.readers.samples.sample_records import GpuSamples, SampledGpu, reasons_of

PACKAGE = "pynvml"
NO_PACKAGE = Missing("nvidia-ml-py is not installed (pip install nvidia-ml-py)")
MILLI = 1000
SUCCESS = 0
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
"""The member of a value's union, by its type (``nvmlValueType_t``)."""
COUNTERS = {
    "ecc_corrected": "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    "ecc_uncorrected": "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    "remapped_rows_correctable": "NVML_FI_DEV_REMAPPED_COR",
    "remapped_rows_uncorrectable": "NVML_FI_DEV_REMAPPED_UNC",
    "remapped_rows_pending": "NVML_FI_DEV_REMAPPED_PENDING",
    "remapped_rows_failed": "NVML_FI_DEV_REMAPPED_FAILURE",
    "nvlink_crc_errors": "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "nvlink_replays": "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "nvlink_recoveries": "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "pcie_replays": "NVML_FI_DEV_PCIE_REPLAY_COUNTER",
    "slowed_by_heat_ns": "NVML_FI_DEV_PERF_POLICY_THERMAL",
    "slowed_by_board_ns": "NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT",
}
"""The driver's names of the counters (``nvml.h``)."""
Value = TypeVar("Value")


class Nvml:
    """All GPUs visible to NVML. A value that cannot be read is None."""

    def __init__(self, package: Any) -> None:  # noqa: ANN401 (a module without types)
        self.package = package
        count: int = package.nvmlDeviceGetCount()
        self.handles = tuple(package.nvmlDeviceGetHandleByIndex(index) for index in range(count))
        uuids = [package.nvmlDeviceGetUUID(handle) for handle in self.handles]
        names = [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]
        self.gpus = tuple(SampledGpu(index=index, uuid=uuid) for index, uuid in enumerate(names))
        self.unsupported: set[tuple[str, int]] = set()

    def read(self, run_pids: Collection[int] = ()) -> GpuSamples:
        """Sample the GPUs; ``run_pids`` are the ids of the run's processes."""
        ask, nvml = self._ask, self.package
        reasons = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(nvml, reasons):
            reasons = "nvmlDeviceGetCurrentClocksThrottleReasons"
        return GpuSamples(
            power_w=ask("nvmlDeviceGetPowerUsage", lambda call, gpu: call(gpu) / MILLI),
            energy_j=ask("nvmlDeviceGetTotalEnergyConsumption", lambda call, gpu: call(gpu) / MILLI),
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", lambda call, gpu: float(call(gpu, nvml.NVML_CLOCK_SM))),
            temperature_c=ask(
                "nvmlDeviceGetTemperature", lambda call, gpu: float(call(gpu, nvml.NVML_TEMPERATURE_GPU))
            ),
            memory_used_bytes=ask("nvmlDeviceGetMemoryInfo", lambda call, gpu: int(call(gpu).used)),
            throttle_reasons=ask(reasons, lambda call, gpu: reasons_of(call(gpu))),
            other_pids=self._others(run_pids),
        )

    def processes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return, for each GPU, the ids of the processes that compute on it; None if they cannot be read."""
        name = "nvmlDeviceGetComputeRunningProcesses"
        return self._ask(name, lambda call, gpu: tuple(sorted(int(one.pid) for one in call(gpu))))

    def counters(self) -> Iterator[tuple[str, int]]:
        """Yield readable counters as ``index/name``, with their values. Raise OSError if no GPU has any."""
        nvml, reported = self.package, False
        names = {name: getattr(nvml, field) for name, field in COUNTERS.items() if hasattr(nvml, field)}
        fields = list(names.values())
        answers = self._ask("nvmlDeviceGetFieldValues", lambda call, gpu: call(gpu, fields))
        for index, values in enumerate(answers):
            for name, value in zip(names, values or (), strict=False):
                if value.nvmlReturn == SUCCESS and (member := MEMBERS.get(value.valueType)):
                    reported = True
                    yield f"{index}/{name}", int(getattr(value.value, member))
        if not reported:
            raise OSError(errno.ENOTSUP, "NVML has no error counters")

    def _others(self, run_pids: Collection[int]) -> tuple[tuple[int, ...] | None, ...]:
        processes = self.processes()
        if not any(pid in run_pids for pids in processes for pid in pids or ()):
            return (None,) * len(processes)
        return tuple(None if pids is None else tuple(pid for pid in pids if pid not in run_pids) for pids in processes)

    def _ask(self, name: str, read: Callable[[Any, Any], Value]) -> tuple[Value | None, ...]:
        return tuple(self._ask_one(name, read, index) for index in range(len(self.handles)))

    def _ask_one(self, name: str, read: Callable[[Any, Any], Value], index: int) -> Value | None:
        call = getattr(self.package, name, None)
        if call is None or (name, index) in self.unsupported:
            return None
        try:
            return read(call, self.handles[index])
        except self.package.NVMLError_NotSupported:
            self.unsupported.add((name, index))
        except self.package.NVMLError:
            return None  # it may answer the next time
        return None


def find_gpus() -> Nvml | Missing:
    """Return the GPUs; Missing if they cannot be sampled."""
    try:
        package = import_module(PACKAGE)
    except ImportError:
        return NO_PACKAGE
    try:
        package.nvmlInit()
        nvml = Nvml(package)
    except package.NVMLError as error:
        return Missing(f"NVML: {error}")
    return nvml if nvml.handles else Missing("NVML finds no GPU")

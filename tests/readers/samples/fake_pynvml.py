# SPDX-License-Identifier: Apache-2.0
"""Stands in for the package of nvidia-ml-py: two GPUs as its documentation describes their answers.

GPU 0 draws 500 W and then 700 W, and counts its energy; GPU 1 draws 400 W and has no such counter.
"""

from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0
calls = {"energy of GPU 1": 0, "power": 0, "init": 0}


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801 (its name there)
    pass


class NVMLError_Unknown(NVMLError):  # noqa: N801
    pass


def nvmlInit() -> None:  # noqa: N802
    calls["init"] += 1


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetUUID(handle: int) -> str | bytes:  # noqa: N802
    return f"GPU-{handle}" if handle else b"GPU-0"


def nvmlDeviceGetPowerUsage(handle: int) -> int:  # noqa: N802
    calls["power"] += 1
    if handle:
        return 400_000
    return 500_000 if calls["power"] < 3 else 700_000


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:  # noqa: N802
    if handle:
        calls["energy of GPU 1"] += 1
        raise NVMLError_NotSupported
    return 1_000_000 * calls["power"]


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> int:  # noqa: N802
    assert kind == NVML_CLOCK_SM
    return 1980 - 300 * handle


def nvmlDeviceGetTemperature(handle: int, kind: int) -> int:  # noqa: N802
    assert kind == NVML_TEMPERATURE_GPU
    return 60 + handle


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:  # noqa: N802
    if handle:
        raise NVMLError_Unknown
    return SimpleNamespace(used=64 << 30, total=80 << 30)


NVML_FI_DEV_ECC_DBE_VOL_TOTAL, NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, NVML_FI_DEV_PCIE_REPLAY_COUNTER = 4, 52, 94


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
    """GPU 1 does not support the one of NVLink. Values are of a union with a member for each type."""
    known = {
        NVML_FI_DEV_ECC_DBE_VOL_TOTAL: (3, SimpleNamespace(ullVal=2 * handle)),
        NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: (3, SimpleNamespace(ullVal=7)),
        NVML_FI_DEV_PCIE_REPLAY_COUNTER: (1, SimpleNamespace(uiVal=5)),
    }
    unsupported = {NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL} if handle else set()
    return [
        SimpleNamespace(nvmlReturn=3 if field in unsupported else 0, valueType=known[field][0], value=known[field][1])
        for field in fields
    ]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:  # noqa: N802 (before nvidia-ml-py 12.535)
    return 0x4 | 0x20 if handle else 0

# SPDX-License-Identifier: Apache-2.0
"""Functions that hide the differences between CPUs and GPUs (clock, memory, name) or set how both compute."""

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from llmb.base.errors import UsageError
from llmb.readers.samples.host import Device


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this process uses on its device, now and at the peak."""

    allocated_bytes: int
    peak_bytes: int


class Moment:
    """The moment when all work queued on a GPU's stream is done; on a CPU, the moment of creation."""

    def __init__(self, device: torch.device) -> None:
        self.time_s = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Return the seconds since an earlier moment; both must have passed on the device."""
        if self.event and earlier.event:
            milliseconds: float = earlier.event.elapsed_time(self.event)
            return milliseconds / 1000
        return self.time_s - earlier.time_s


Span = tuple[Moment, Moment]


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def local_device(kind: Device) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def leave_free(sms: int, device: torch.device) -> None:
    """Make cuBLASLt leave ``sms`` multiprocessors of a GPU free for collectives."""
    if sms and device.type == "cuda":
        torch._C._set_sm_carveout_experimental(sms)


def exact_fp32() -> None:
    """Compute fp32 matrix products in full precision: GPUs could otherwise round inputs to 10 mantissa bits (TF32)."""
    torch.set_float32_matmul_precision("highest")


REPRODUCIBLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_NVLS_ENABLE": ("0",)}
)
"""Values of variables with which results repeat bit for bit, the default first (Megatron-LM also excludes NVLS)."""


def be_deterministic() -> None:
    """Use only deterministic algorithms; call before CUDA and NCCL start. Raise UsageError if the environment
    contradicts ``REPRODUCIBLE``."""
    for name, valid in REPRODUCIBLE.items():
        value = os.environ.setdefault(name, valid[0])
        if value not in valid:
            what = f"--deterministic is set, but {name} is {value!r}; it must be {' or '.join(valid)}"
            raise UsageError(what, do=f"omit {name} (shell, --env, cluster_config.yaml), or --deterministic")
    torch.use_deterministic_algorithms(True)


def memory(device: torch.device) -> Memory:
    """Return PyTorch's allocated memory on a GPU, or the process's resident memory on a CPU, in bytes."""
    if device.type == "cuda":
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    statm = Path("/proc/self/statm")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    resident = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    # Linux updates the peak less often than the present size.
    return Memory(resident, max(resident, peak))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the model of this machine's CPU, or its architecture if the model is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

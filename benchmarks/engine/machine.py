# SPDX-License-Identifier: Apache-2.0
"""The GPU as reported by the driver: name, driver, memory, power limit, clocks. None without a driver."""

import os
import platform
import shutil
import subprocess
from typing import Any

FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
)
LIMIT_S = 30
IDLE_MIB = 2048
"""What a driver may use of a GPU's memory without any other process."""


def gpu_state() -> dict[str, str] | None:
    """The driver's words and units, for the first GPU that is visible."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    if first := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip():
        command.append(f"--id={first}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    lines = found.splitlines()
    return dict(zip(FIELDS, map(str.strip, lines[0].split(",")), strict=False)) if lines else None


def memory_bytes(state: dict[str, str] | None) -> float | None:
    """The memory of a GPU."""
    found = mebibytes(state, "memory.total")
    return None if found is None else found * 2**20


def mebibytes(state: dict[str, str] | None, field: str) -> float | None:
    """As the driver prints memory."""
    words = (state or {}).get(field, "").split()
    return float(words[0]) if len(words) == 2 and words[1] == "MiB" else None


def in_use(state: dict[str, str] | None) -> str | None:
    """What to say if something else runs on the GPU."""
    used = mebibytes(state, "memory.used")
    if used is None or used <= IDLE_MIB:
        return None
    return f"{used / 1024:.1f} GiB of the GPU's memory are in use: if by something that runs, times will be too long"


def describe_machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "system": platform.platform(), "gpu_before": gpu_state()}

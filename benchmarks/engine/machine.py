# SPDX-License-Identifier: Apache-2.0
"""The GPU as reported by the driver: name, driver, memory, power limit, clocks. None without a driver."""

import platform
import shutil
import subprocess
from typing import Any

FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
)
LIMIT_S = 30


def gpu_state() -> dict[str, str] | None:
    """The driver's words and units, for the first GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    lines = found.splitlines()
    return dict(zip(FIELDS, map(str.strip, lines[0].split(",")), strict=False)) if lines else None


def memory_bytes(state: dict[str, str] | None) -> float | None:
    """The memory of a GPU, which the driver prints in MiB."""
    words = (state or {}).get("memory.total", "").split()
    return float(words[0]) * 2**20 if len(words) == 2 and words[1] == "MiB" else None


def describe_machine() -> dict[str, Any]:
    return {"python": platform.python_version(), "system": platform.platform(), "gpu_before": gpu_state()}

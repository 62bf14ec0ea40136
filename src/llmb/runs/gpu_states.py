# SPDX-License-Identifier: Apache-2.0
"""What ``nvidia-smi --query-gpu`` prints as CSV. Pure.

The driver's version decides which fields it knows, and one that it does not know fails the whole query: so there are
several queries, the most complete one first.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from llmb.resources.records import reasons_of
from llmb.runs.environment import GpuState

PROGRAM = "nvidia-smi"
TEXTS = {
    "uuid": "uuid",
    "name": "name",
    "persistence_mode": "persistence_mode",
    "mig_mode": "mig.mode.current",
    "ecc_mode": "ecc.mode.current",
}
NUMBERS = {
    "power_limit_w": "power.limit",
    "default_power_limit_w": "power.default_limit",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "application_sm_clock_mhz": "clocks.applications.graphics",
    "application_memory_clock_mhz": "clocks.applications.memory",
}
COUNTED = ("sw_power_cap", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_PLAIN = ("index", "driver_version", *TEXTS.values(), *NUMBERS.values())
_EVENTS, _COUNTERS = "clocks_event_reasons.active", [f"clocks_event_reasons_counters.{name}" for name in COUNTED]
QUERIES = (
    (*_PLAIN, _EVENTS, *_COUNTERS),
    (*_PLAIN, _EVENTS),
    (*_PLAIN, "clocks_throttle_reasons.active"),
)
"""Before driver 535 events were called throttling."""


class NodeGpus(NamedTuple):
    """The GPUs that a node shows; ``driver`` is None without any."""

    driver: str | None
    gpus: tuple[GpuState, ...]


def command(fields: Iterable[str]) -> list[str]:
    return [PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_states(text: str, fields: tuple[str, ...], node: str) -> NodeGpus:
    """What was printed for ``fields``; what is not supported or unknown is None, and other lines are left out."""
    rows = [dict(zip(fields, values, strict=True)) for values in _rows(text) if len(values) == len(fields)]
    found = [row for row in rows if row["index"].isdecimal()]
    drivers = (_text(row["driver_version"]) for row in found)
    return NodeGpus(next(filter(None, drivers), None), tuple(_state(row, node) for row in found))


def of_run(gpus: Iterable[GpuState], uuids: Iterable[str | None]) -> tuple[GpuState, ...]:
    """States of the run's devices; all of them if an id is unknown, as that of a part of a GPU (MIG) is."""
    listed, wanted = tuple(gpus), {uuid and uuid.removeprefix("GPU-") for uuid in uuids}
    known = {gpu.uuid and gpu.uuid.removeprefix("GPU-") for gpu in listed}
    if not wanted <= known:
        return listed
    return tuple(gpu for gpu in listed if gpu.uuid and gpu.uuid.removeprefix("GPU-") in wanted)


def _rows(text: str) -> Iterable[list[str]]:
    return ([value.strip() for value in line.split(",")] for line in text.splitlines())


def _state(row: dict[str, str], node: str) -> GpuState:
    reasons = next((row[name] for name in (_EVENTS, "clocks_throttle_reasons.active") if name in row), "")
    values: dict[str, Any] = {name: _text(row[field]) for name, field in TEXTS.items()}
    values |= {name: _number(row[field]) for name, field in NUMBERS.items()}
    counts = {name: _number(row.get(field, "")) for name, field in zip(COUNTED, _COUNTERS, strict=True)}
    known = {name: count for name, count in counts.items() if count is not None}
    return GpuState(
        node=node, index=int(row["index"]), **values, throttle_reasons=_reasons(reasons), throttled_us=known or None
    )


def _reasons(text: str) -> tuple[str, ...] | None:
    if not re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return None
    return reasons_of(int(text, 16))


def _text(value: str) -> str | None:
    """None for ``[N/A]``, ``[Not Supported]``, ``[Unknown Error]``, and for words that mean the same."""
    return None if not value or value.startswith("[") or value in ("N/A", "Unknown") else value


def _number(value: str) -> float | None:
    """Some drivers print a unit even where none is asked for."""
    found = re.match(r"\d+(\.\d+)?(?=\s|$)", value)
    return float(found[0]) if found else None

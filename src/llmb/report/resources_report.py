# SPDX-License-Identifier: Apache-2.0
"""What a run used of GPUs and nodes, as rows of the result's table: at most two."""

from collections.abc import Iterator

from llmb.report.numbers import number
from llmb.resources.records import HostUse, ResourceUse
from llmb.verdict.causes_rules import cause_rules

SOURCES = {
    "gpu_counter": "by the GPUs' counters",
    "gpu_power": "by their sampled power",
    "cpu_package": "of the CPU packages",
}


def resource_rows(use: ResourceUse) -> Iterator[tuple[str, str, str]]:
    """Name, value and note. Of GPUs their power, else the busiest node's CPU; and the energy per token."""
    if use.power_w_mean is not None:
        yield "GPU power W", number(use.power_w_mean), ", ".join(_gpu_notes(use))
    else:
        yield from _host_row(use)
    if use.energy_j_per_token is not None and use.energy_j is not None and use.energy_source:
        note = f"{number(use.energy_j)} J in the window, {SOURCES[use.energy_source]}"
        yield "energy J/token", number(use.energy_j_per_token), note


def _gpu_notes(use: ResourceUse) -> Iterator[str]:
    yield "mean of a GPU"
    if use.sm_clock_mhz_mean is not None:
        yield f"SM clock {use.sm_clock_mhz_mean:.0f} MHz"
    if use.temperature_c_max is not None:
        yield f"at most {use.temperature_c_max:.0f} C"
    for name, share in (use.throttled or {}).items():
        if name not in cause_rules().idle_reasons and share >= 0.01:
            yield f"{name} {100 * share:.0f} %"


def _host_row(use: ResourceUse) -> Iterator[tuple[str, str, str]]:
    host = max(use.hosts, key=lambda host: host.cpu_pct_mean or 0.0)
    if host.cpu_pct_mean is not None:
        of = f"of {host.node}, the busiest of {len(use.hosts)}" if len(use.hosts) > 1 else "of all cores"
        yield "host CPU %", number(host.cpu_pct_mean), ", ".join([of, *_host_notes(host)])


def _host_notes(host: HostUse) -> Iterator[str]:
    if host.memory_used_gib_max is not None:
        yield f"memory at most {number(host.memory_used_gib_max)} GiB"
    for name, share in (("I/O wait", host.iowait_pct_mean), ("stolen", host.steal_pct_mean)):
        if share is not None and share >= 1:
            yield f"{name} {number(share)} %"

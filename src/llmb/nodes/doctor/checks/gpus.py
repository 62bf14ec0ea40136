# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs, and of their links to each other and to the host."""

from collections import Counter
from collections.abc import Iterator, Sequence

from llmb.base.missing import Missing
from llmb.base.shown_text import counted, listed
from llmb.catalogue.records import Gpu, gpu_type_of
from llmb.nodes.doctor.checks.nvidia_smi import GpuFacts, LinkErrors, NvLinks
from llmb.nodes.doctor.facts import TargetFacts
from llmb.nodes.doctor.rules import Finding, indexes, names_of, rule, skipped
from llmb.runs.environment import GpuState

RECOVERY = "recovery"
"""Part of the name of nvidia-smi's counter of links that failed and were retrained."""
ROUNDING = 0.995
UNSEEN, NO_ECC = "nvidia-smi does not report it", "the GPUs have no ECC or do not report it"
COUNT = "gpu_count"
HARDWARE_LIMITS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
OTHER_LIMITS = ("sw_thermal_slowdown", "sync_boost")
"""Reasons for lower clocks that cause a warning instead of a failure."""
COUNTED_LIMITS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def gpu_checks(facts: GpuFacts, target: TargetFacts) -> Iterator[Finding]:
    """Check the GPUs; if nvidia-smi reports none, check at most their number."""
    if isinstance(facts.states, Missing):
        yield from _without_gpus(facts, target, facts.states.reason)
        return
    gpus, driver = facts.states.gpus, facts.states.driver
    yield _count(facts.on_bus, gpus, target)
    of = rule("gpu_state")
    yield of.check("fail", listed(facts.unwell)) if facts.unwell else of.passed("all answer")
    yield _type(gpus, target)
    yield rule("gpu_driver").passed(driver) if driver else rule("gpu_driver").skipped(UNSEEN)
    yield _ecc_mode(gpus)
    yield _ecc_errors(facts, gpus)
    yield _row_remapping(facts, gpus)
    yield _clocks(gpus)
    yield _throttling(gpus)
    yield _throttled_time(facts.up_s, gpus)
    yield _temperature(gpus)
    yield _mode("gpu_persistence", {gpu.index: gpu.persistence_mode for gpu in gpus}, "Enabled", UNSEEN)
    yield _mode("gpu_mig", {gpu.index: gpu.mig_mode for gpu in gpus}, "Disabled", "the GPUs have no MIG mode")
    yield _power_limit(gpus, target)
    yield _processes(facts)
    yield _links(facts.links, gpus, target)
    yield _link_errors(facts.link_errors, gpus)
    yield _fabric(facts, gpus)
    yield _pcie(facts, gpus)


def _without_gpus(facts: GpuFacts, target: TargetFacts, reason: str) -> Iterator[Finding]:
    names = names_of("gpu")
    if not (target.needs_gpus or facts.on_bus):
        yield from skipped(names, f"no GPU: {reason}")
        return
    expected = f" of {target.gpus} ({target.gpus_by})" if target.needs_gpus else ""
    on_bus = f"; {facts.on_bus} on the PCI bus" if facts.on_bus else ""
    case = "hung" if facts.hung else "no_driver" if facts.on_bus else "absent"
    yield rule(COUNT).check("fail", f"0{expected}: {reason}{on_bus}", case)
    names.remove(COUNT)
    yield from skipped(names, reason)


def _catalogued(gpus: Sequence[GpuState], target: TargetFacts) -> Gpu | None:
    name = gpu_type_of(gpus[0].name or "", target.catalogue.values())
    return target.catalogue[name] if name else None


def _count(on_bus: int, gpus: Sequence[GpuState], target: TargetFacts) -> Finding:
    of, count = rule(COUNT), len(gpus)
    expected, by = target.gpus, target.gpus_by
    if expected is None:
        kind = _catalogued(gpus, target)
        if kind and count < kind.gpus_per_node:
            return of.check("warn", f"{count}; nodes of {kind.gpu_type} have {kind.gpus_per_node}", "usual")
        if on_bus > count:
            return of.check("warn", f"{count}; {on_bus} on the PCI bus", "lost")
        return of.passed(f"{count}")
    if count < expected:
        lost = f"; {on_bus} on the PCI bus" if on_bus > count else ""
        return of.check("fail", f"{count} of {expected} ({by}){lost}", "lost" if lost else "")
    if count > expected:
        return of.check("warn", f"{count}; {expected} expected ({by})", "more")
    return of.passed(f"{count} of {expected}")


def _type(gpus: Sequence[GpuState], target: TargetFacts) -> Finding:
    of, names = rule("gpu_type"), Counter(gpu.name for gpu in gpus if gpu.name)
    if not names:
        return of.skipped(UNSEEN)
    if len(names) > 1:
        return of.check("fail", listed(f"{count} x {name}" for name, count in names.items()), "mixed")
    (name,) = names
    kind = gpu_type_of(name, target.catalogue.values())
    if target.gpu and target.gpu.gpu_type != kind:
        return of.check("fail", f"{name}, not {target.gpu.gpu_type} ({target.gpu_type_by})")
    return of.passed(name) if kind else of.check("warn", name, "unknown")


def _ecc_mode(gpus: Sequence[GpuState]) -> Finding:
    of, modes = rule("gpu_ecc_mode"), {gpu.index: gpu.ecc_mode for gpu in gpus if gpu.ecc_mode}
    if not modes:
        return of.skipped(NO_ECC)
    off = [index for index, mode in modes.items() if mode == "Disabled"]
    return of.check("warn", f"disabled on {indexes(off)}") if off else of.passed("enabled")


def _ecc_errors(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_ecc_errors")
    if isinstance(facts.ecc, Missing):
        return of.skipped(facts.ecc.reason)
    if all(one.since_load is None for one in facts.ecc):
        return of.skipped(NO_ECC)
    bad = [f"{one.since_load} on {_named(one.uuid, gpus)}" for one in facts.ecc if one.since_load]
    if bad:
        return of.check("fail", f"uncorrected: {listed(bad)}")
    in_life = sum(one.in_life or 0 for one in facts.ecc)
    return of.passed(f"0 uncorrected since the driver was loaded, {in_life:,} in the GPUs' lifetime")


def _named(uuid: str, gpus: Sequence[GpuState]) -> str:
    return next((f"GPU {gpu.index}" for gpu in gpus if gpu.uuid == uuid), uuid)


def _row_remapping(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_row_remapping")
    if isinstance(facts.remapped, Missing):
        return of.skipped(facts.remapped.reason)
    if all(one.failure is None and one.pending is None for one in facts.remapped):
        return of.skipped("the GPUs do not remap rows or do not report it")
    if failed := [_named(one.uuid, gpus) for one in facts.remapped if one.failure]:
        return of.check("fail", f"failed on {listed(failed)}")
    if pending := [_named(one.uuid, gpus) for one in facts.remapped if one.pending]:
        return of.check("warn", f"pending on {listed(pending)}", "pending")
    rows = sum(one.rows or 0 for one in facts.remapped)
    return of.passed(f"{counted(rows, 'row')} remapped after uncorrected errors; none pending, none failed")


def _clocks(gpus: Sequence[GpuState]) -> Finding:
    of, clocks = rule("gpu_clocks"), {gpu.max_sm_clock_mhz for gpu in gpus if gpu.max_sm_clock_mhz}
    if not clocks:
        return of.skipped(UNSEEN)
    if low := _with_reason(gpus, "applications_clocks_setting"):
        return of.check("warn", f"set below the maximum on {indexes(low)}", "set")
    text = listed(f"{clock:.0f} MHz" for clock in sorted(clocks))
    return of.check("warn", f"different maximums: {text}") if len(clocks) > 1 else of.passed(f"up to {text}")


def _with_reason(gpus: Sequence[GpuState], reason: str) -> list[int]:
    return [gpu.index for gpu in gpus if reason in (gpu.throttle_reasons or ())]


def _throttling(gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_throttling")
    if all(gpu.throttle_reasons is None for gpu in gpus):
        return of.skipped(UNSEEN)
    hardware, others = (
        [f"{reason} on {indexes(devices)}" for reason in reasons if (devices := _with_reason(gpus, reason))]
        for reasons in (HARDWARE_LIMITS, OTHER_LIMITS)
    )
    if hardware or others:
        return of.check("fail" if hardware else "warn", listed(hardware or others))
    return of.passed("nothing")


def _throttled_time(up_s: float | None, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_throttled_time")
    counts = [
        (count / 1e6, reason, gpu.index)
        for gpu in gpus
        for reason, count in (gpu.throttled_us or {}).items()
        if reason in COUNTED_LIMITS
    ]
    if not counts or not up_s:
        return of.skipped(UNSEEN if up_s else "the time since boot is unknown")
    seconds, reason, index = max(counts)
    if not seconds:
        return of.passed("none since the driver was loaded")
    text = f"at most {seconds:,.0f} s ({reason}, GPU {index}) of {up_s / 3600:,.1f} h since boot"
    return of.measured(100 * seconds / up_s, text)


def _temperature(gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_temperature")
    hot = [(gpu.temperature_c, gpu.index) for gpu in gpus if gpu.temperature_c is not None]
    if not hot:
        return of.skipped(UNSEEN)
    degrees, index = max(hot)
    return of.measured(degrees, f"at most {degrees:.0f} °C (GPU {index})")


def _mode(name: str, modes: dict[int, str | None], good: str, without: str) -> Finding:
    of = rule(name)
    if not any(modes.values()):
        return of.skipped(without)
    bad = {index: mode for index, mode in modes.items() if mode and mode != good}
    if not bad:
        return of.passed(good.lower())
    return of.check("fail" if of.fails_if else "warn", f"{next(iter(bad.values())).lower()} on {indexes(bad)}")


def _power_limit(gpus: Sequence[GpuState], target: TargetFacts) -> Finding:
    of, limits = rule("gpu_power_limit"), {gpu.index: gpu.power_limit_w for gpu in gpus if gpu.power_limit_w}
    if not limits:
        return of.skipped(UNSEEN)
    kind = _catalogued(gpus, target)
    tdp_w = kind.tdp_w if kind and kind.tdp_w else 0
    usual = {gpu.index: max(gpu.default_power_limit_w or 0, tdp_w) for gpu in gpus}
    low = [
        f"{limit:.0f} W of {usual[index]:.0f} W on GPU {index}"
        for index, limit in limits.items()
        if limit < usual[index] - 0.5
    ]
    if low:
        return of.check("warn", listed(low))
    return of.passed(listed(sorted({f"{limit:.0f} W" for limit in limits.values()})))


def _processes(facts: GpuFacts) -> Finding:
    of = rule("gpu_processes")
    if isinstance(facts.processes, Missing):
        return of.skipped(facts.processes.reason)
    return of.check("warn", listed(sorted(set(facts.processes)))) if facts.processes else of.passed("none")


def _links(links: Sequence[NvLinks] | Missing, gpus: Sequence[GpuState], target: TargetFacts) -> Finding:
    """Compare the total rate of each GPU's links, in both directions, with the catalogue and with the other GPUs."""
    of, kind = rule("gpu_nvlink"), _catalogued(gpus, target)
    if len(gpus) == 1:
        return of.skipped("a single GPU has no links to others")
    full = kind.nvlink_gb_s if kind else 0
    gb_s = {} if isinstance(links, Missing) else {one.gpu: one.gb_s for one in links}
    if not gb_s:
        if kind and full:
            return of.check("fail", f"no links; {kind.gpu_type} has {full:,.0f} GB/s")
        return of.skipped(links.reason if isinstance(links, Missing) else "the GPUs have no NVLink")
    down = [f"{gb_s[gpu].count(None)} of {len(gb_s[gpu])} on GPU {gpu}" for gpu in gb_s if None in gb_s[gpu]]
    rates = {gpu.index: 2 * sum(rate or 0 for rate in gb_s.get(gpu.index, ())) for gpu in gpus}
    slow = [f"{rate:,.0f} of {full:,.0f} GB/s on GPU {gpu}" for gpu, rate in rates.items() if rate < full * ROUNDING]
    if slow or (down and not full):
        return of.check("fail", f"inactive: {listed(down)}" if down else listed(slow))
    least, most = min(rates.values()), max(rates.values())
    if most > least / ROUNDING:
        return of.check("fail", f"from {least:,.0f} to {most:,.0f} GB/s")
    return of.passed(f"{max(map(len, gb_s.values()))} links per GPU, {most:,.0f} GB/s")


def _link_errors(errors: Sequence[LinkErrors] | Missing, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_nvlink_errors")
    if isinstance(errors, Missing):
        return of.skipped(errors.reason)
    if not any(one.counts for one in errors):
        one = len(gpus) == 1
        return of.skipped("a single GPU has no links to others" if one else "the GPUs have no NVLink counters")
    bad = [(name, count, one.gpu) for one in errors for name, count in one.counts.items() if count]
    if not bad:
        return of.passed("0 since the driver was loaded")
    lost = [item for item in bad if RECOVERY in item[0].lower()]
    text = listed(f"{count:,} {name} on GPU {gpu}" for name, count, gpu in lost or bad)
    return of.check("fail", text, "lost") if lost else of.check("warn", text)


def _fabric(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_fabric")
    if isinstance(facts.fabric, Missing):
        return of.skipped(facts.fabric.reason)
    states = [one for one in facts.fabric if one.state]
    if not states:
        return of.skipped("the GPUs are not connected to an NVLink switch")
    bad = [
        f"{one.state}, {one.status or 'status unknown'} on {_named(one.uuid, gpus)}"
        for one in states
        if one.state != "Completed" or one.status not in (None, "Success")
    ]
    return of.check("fail", listed(bad)) if bad else of.passed("completed")


def _pcie(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_pcie")
    if isinstance(facts.pcie, Missing):
        return of.skipped(facts.pcie.reason)
    widths = [(one.width, one.max_width, one.uuid) for one in facts.pcie if one.width and one.max_width]
    if not widths:
        return of.skipped(UNSEEN)
    low = [f"x{width} of x{most} on {_named(uuid, gpus)}" for width, most, uuid in widths if width < most]
    return of.check("warn", listed(low)) if low else of.passed(listed(sorted({f"x{width}" for width, _, _ in widths})))

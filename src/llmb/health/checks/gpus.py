# SPDX-License-Identifier: Apache-2.0
"""Checks of GPUs by themselves; those of their links are in ``gpu_links``."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from llmb.health.checks.words import counted, indexes, listed
from llmb.health.facts.gpus import GpuFacts, LinkErrors, NvLinks
from llmb.health.facts.source import Missing
from llmb.health.records import Check
from llmb.health.rules import Finding, names_of, rule, skipped
from llmb.health.wanted import WantedFacts
from llmb.runs.environment import GpuState
from llmb.site.machine import gpu_type_of

RECOVERY = "recovery"
"""In the name of the counter of links that were lost and trained again."""
ROUNDING = 0.995


def link_checks(facts: GpuFacts, gpus: Sequence[GpuState], wanted: WantedFacts) -> Iterator[Finding]:
    yield _links(facts.links, gpus, wanted)
    yield _link_errors(facts.link_errors, gpus)
    yield _fabric(facts, gpus)
    yield _pcie(facts, gpus)


def _links(links: Sequence[NvLinks] | Missing, gpus: Sequence[GpuState], wanted: WantedFacts) -> Finding:
    """Both directions of all links of each GPU, beside what its type has."""
    of = rule("gpu_nvlink")
    if len(gpus) == 1:
        return of.skipped("one GPU has no other to be linked with")
    kind = gpu_type_of(gpus[0].name or "", wanted.catalogue.values())
    full = wanted.catalogue[kind].nvlink_gb_s if kind else None
    found = {} if isinstance(links, Missing) else {one.gpu: one.gb_s for one in links}
    if not found:
        if full:
            return of.found("fail", f"no links; {kind} has {full:,.0f} GB/s")
        return of.skipped(links.reason if isinstance(links, Missing) else "the GPUs have no NVLink")
    down = [f"{found[gpu].count(None)} of {len(found[gpu])} on GPU {gpu}" for gpu in found if None in found[gpu]]
    rates = {gpu: 2 * sum(rate or 0 for rate in found.get(gpu, ())) for gpu in (gpu.index for gpu in gpus)}
    slow = [
        f"{rate:,.0f} of {full:,.0f} GB/s on GPU {gpu}" for gpu, rate in rates.items() if rate < (full or 0) * ROUNDING
    ]
    if slow or (down and not full):
        return of.found("fail", f"inactive: {listed(down)}" if down else listed(slow))
    if max(rates.values()) > min(rates.values()) / ROUNDING:
        return of.found("fail", f"from {min(rates.values()):,.0f} to {max(rates.values()):,.0f} GB/s")
    return of.passed(f"{max(map(len, found.values()))} links a GPU, {max(rates.values()):,.0f} GB/s")


def _link_errors(errors: Sequence[LinkErrors] | Missing, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_nvlink_errors")
    if isinstance(errors, Missing):
        return of.skipped(errors.reason)
    if not any(one.counts for one in errors):
        one = len(gpus) == 1
        return of.skipped("one GPU has no other to be linked with" if one else "the GPUs have no counters of NVLink")
    bad = [(name, count, one.gpu) for one in errors for name, count in one.counts.items() if count]
    if not bad:
        return of.passed("0 since the driver was loaded")
    lost = [item for item in bad if RECOVERY in item[0].lower()]
    text = listed(f"{count:,} {name} on GPU {gpu}" for name, count, gpu in lost or bad)
    return of.found("fail", text, "lost") if lost else of.found("warn", text)


def _fabric(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_fabric")
    if isinstance(facts.fabric, Missing):
        return of.skipped(facts.fabric.reason)
    index = {gpu.uuid: gpu.index for gpu in gpus}
    states = {index.get(one.uuid, -1): one for one in facts.fabric if one.state}
    if not states:
        return of.skipped("the GPUs are on no NVLink switch")
    bad = [
        f"{one.state}, {one.status or 'status unknown'} on GPU {gpu}"
        for gpu, one in states.items()
        if one.state != "Completed" or one.status not in (None, "Success")
    ]
    return of.found("fail", listed(bad)) if bad else of.passed("completed")


def _pcie(facts: GpuFacts, gpus: Sequence[GpuState]) -> Finding:
    of = rule("gpu_pcie")
    if isinstance(facts.pcie, Missing):
        return of.skipped(facts.pcie.reason)
    index = {gpu.uuid: gpu.index for gpu in gpus}
    known = [one for one in facts.pcie if one.width and one.max_width]
    if not known:
        return of.skipped("nvidia-smi does not show it")
    low = [
        f"x{one.width} of x{one.max_width} on GPU {index.get(one.uuid, '?')}"
        for one in known
        if one.width and one.max_width and one.width < one.max_width
    ]
    return of.found("warn", listed(low)) if low else of.passed(listed(sorted({f"x{one.width}" for one in known})))


COUNT = "gpu_count"
HARDWARE_LIMITS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
OTHER_LIMITS = ("sw_thermal_slowdown", "sync_boost")
"""Besides these there are reasons that a busy or an idle GPU has without a fault."""
COUNTED_LIMITS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def gpu_checks(facts: GpuFacts, wanted: WantedFacts) -> Iterator[Finding]:
    """Without GPUs that should be here, the only check is their number."""
    if isinstance(facts.states, Missing):
        reason = facts.states.reason
        names = names_of("gpu")
        if wanted.needs_gpus or facts.on_bus:
            yield _none_found(facts, wanted, reason)
            names.remove(COUNT)
        yield from skipped(names, reason if facts.on_bus or wanted.needs_gpus else f"no GPU: {reason}")
        return
    gpus = facts.states.gpus
    yield _count(facts.on_bus, gpus, wanted)
    of = rule("gpu_state")
    yield of.found("fail", listed(facts.unwell)) if facts.unwell else of.passed("all answer")
    yield from _types(gpus, wanted)
    driver = facts.states.driver
    yield rule("gpu_driver").passed(driver) if driver else rule("gpu_driver").skipped("nvidia-smi does not show it")
    yield from _memory(facts, gpus)
    yield from _clocks(facts, gpus)
    yield from _settings(gpus, wanted)
    yield from _processes(facts)
    yield from link_checks(facts, gpus, wanted)


def _none_found(facts: GpuFacts, wanted: WantedFacts, reason: str) -> Check:
    expected = f" of {wanted.gpus} ({wanted.gpus_by})" if wanted.needs_gpus else ""
    on_bus = f"; {facts.on_bus} on the PCI bus" if facts.on_bus else ""
    case = "hung" if facts.hung else "no_driver" if facts.on_bus else "absent"
    return rule(COUNT).found("fail", f"0{expected}: {reason}{on_bus}", case)


def _count(on_bus: int, gpus: Sequence[GpuState], wanted: WantedFacts) -> Finding:
    count = len(gpus)
    expected, by = wanted.gpus, wanted.gpus_by
    if expected is None:
        found = gpu_type_of(gpus[0].name or "", wanted.catalogue.values())
        usual = wanted.catalogue[found].gpus_per_node if found else count
        if count < usual:
            return rule(COUNT).found("warn", f"{count}; nodes of {found} have {usual}", "usual")
    elif count < expected:
        lost = f"; {on_bus} on the PCI bus" if on_bus > count else ""
        return rule(COUNT).found("fail", f"{count} of {expected} ({by}){lost}", "lost" if lost else "")
    elif count > expected:
        return rule(COUNT).found("warn", f"{count}; {expected} expected ({by})", "more")
    if on_bus > count and expected is None:
        return rule(COUNT).found("warn", f"{count}; {on_bus} on the PCI bus", "lost")
    return rule(COUNT).passed(f"{count}" if expected is None else f"{count} of {expected}")


def _types(gpus: Sequence[GpuState], wanted: WantedFacts) -> Iterator[Finding]:
    names = Counter(gpu.name for gpu in gpus if gpu.name)
    of = rule("gpu_type")
    if not names:
        yield of.skipped("nvidia-smi does not show it")
        return
    text = listed(f"{count} x {name}" if len(names) > 1 else name for name, count in names.items())
    found = {gpu_type_of(name, wanted.catalogue.values()) for name in names}
    if len(names) > 1:
        yield of.found("fail", text, "mixed")
    elif wanted.gpu and wanted.gpu.gpu_type not in found:
        yield of.found("fail", f"{text}, not {wanted.gpu.gpu_type} ({wanted.gpu_type_by})")
    elif None in found:
        yield of.found("warn", text, "unknown")
    else:
        yield of.passed(text)


def _memory(facts: GpuFacts, gpus: Sequence[GpuState]) -> Iterator[Finding]:
    modes = {gpu.index: gpu.ecc_mode for gpu in gpus if gpu.ecc_mode}
    off = [index for index, mode in modes.items() if mode == "Disabled"]
    of = rule("gpu_ecc_mode")
    yield (
        of.skipped("the GPUs have no ECC, or do not show it")
        if not modes
        else of.found("warn", f"disabled on {indexes(off)}")
        if off
        else of.passed("enabled")
    )
    of, names = rule("gpu_ecc_errors"), {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
    if isinstance(facts.ecc, Missing):
        yield of.skipped(facts.ecc.reason)
    elif all(one.since_load is None for one in facts.ecc):
        yield of.skipped("the GPUs have no ECC, or do not show it")
    else:
        bad = [f"{one.since_load} on {names.get(one.uuid, one.uuid)}" for one in facts.ecc if one.since_load]
        in_life = sum(one.in_life or 0 for one in facts.ecc)
        text = f"0 uncorrected since the driver was loaded, {in_life:,} in the GPUs' life"
        yield of.found("fail", f"uncorrected: {listed(bad)}") if bad else of.passed(text)
    of = rule("gpu_row_remapping")
    if isinstance(facts.remapped, Missing):
        yield of.skipped(facts.remapped.reason)
        return
    if all(one.failure is None and one.pending is None for one in facts.remapped):
        yield of.skipped("the GPUs do not remap rows, or do not show it")
        return
    failed = [names.get(one.uuid, one.uuid) for one in facts.remapped if one.failure]
    pending = [names.get(one.uuid, one.uuid) for one in facts.remapped if one.pending]
    rows = sum(one.rows or 0 for one in facts.remapped)
    if failed:
        yield of.found("fail", f"failed on {listed(failed)}")
    elif pending:
        yield of.found("warn", f"pending on {listed(pending)}", "pending")
    else:
        yield of.passed(f"{counted(rows, 'row')} remapped after uncorrected errors; none pending, none failed")


def _clocks(facts: GpuFacts, gpus: Sequence[GpuState]) -> Iterator[Finding]:
    of = rule("gpu_clocks")
    clocks = {gpu.max_sm_clock_mhz for gpu in gpus if gpu.max_sm_clock_mhz}
    low = [gpu.index for gpu in gpus if "applications_clocks_setting" in (gpu.throttle_reasons or ())]
    text = listed(f"{clock:.0f} MHz" for clock in sorted(clocks))
    yield (
        of.skipped("nvidia-smi does not show it")
        if not clocks
        else of.found("warn", f"set below the maximum on {indexes(low)}", "set")
        if low
        else of.found("warn", f"different maximums: {text}")
        if len(clocks) > 1
        else of.passed(f"up to {text}")
    )
    yield from _throttling(gpus)
    yield _throttled_time(facts.up_s, gpus)
    of = rule("gpu_temperature")
    hot = [(gpu.temperature_c, gpu.index) for gpu in gpus if gpu.temperature_c is not None]
    if hot:
        degrees, index = max(hot)
        yield of.measured(degrees, f"at most {degrees:.0f} °C (GPU {index})")
    else:
        yield of.skipped("nvidia-smi does not show it")


def _throttling(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    of = rule("gpu_throttling")
    if all(gpu.throttle_reasons is None for gpu in gpus):
        yield of.skipped("nvidia-smi does not show it")
        return
    for status, reasons in (("fail", HARDWARE_LIMITS), ("warn", OTHER_LIMITS)):
        now = {reason: _with_reason(gpus, reason) for reason in reasons}
        active = [f"{reason} on {indexes(found)}" for reason, found in now.items() if found]
        if active:
            yield of.found("fail" if status == "fail" else "warn", listed(active))
            return
    yield of.passed("nothing")


def _with_reason(gpus: Iterable[GpuState], reason: str) -> list[int]:
    return [gpu.index for gpu in gpus if reason in (gpu.throttle_reasons or ())]


def _throttled_time(up_s: float | None, gpus: Sequence[GpuState]) -> Finding:
    """The driver was loaded when the node was booted, or later: the share is a lower bound."""
    of = rule("gpu_throttled_time")
    counts = [
        (count / 1e6, reason, gpu.index)
        for gpu in gpus
        for reason, count in (gpu.throttled_us or {}).items()
        if reason in COUNTED_LIMITS
    ]
    if not counts or not up_s:
        return of.skipped("nvidia-smi does not show it" if up_s else "the time since the boot is not known")
    seconds, reason, index = max(counts)
    if not seconds:
        return of.passed("none since the driver was loaded")
    text = f"at most {seconds:,.0f} s ({reason}, GPU {index}) of {up_s / 3600:,.1f} h since the boot"
    return of.measured(100 * seconds / up_s, text)


def _settings(gpus: Sequence[GpuState], wanted: WantedFacts) -> Iterator[Finding]:
    yield _mode("gpu_persistence", {gpu.index: gpu.persistence_mode for gpu in gpus}, good="Enabled")
    modes = {gpu.index: gpu.mig_mode for gpu in gpus}
    if any(modes.values()):
        yield _mode("gpu_mig", modes, good="Disabled")
    else:
        yield rule("gpu_mig").skipped("the GPUs have no MIG mode")
    of = rule("gpu_power_limit")
    limits = {gpu.index: (gpu.power_limit_w, gpu.default_power_limit_w) for gpu in gpus if gpu.power_limit_w}
    known = gpu_type_of(gpus[0].name or "", wanted.catalogue.values())
    tdp_w = wanted.catalogue[known].tdp_w if known else None
    low = [
        f"{now:.0f} W of {usual:.0f} W on GPU {index}"
        for index, (now, default) in limits.items()
        if now and (usual := max(default or 0, tdp_w or 0)) and now < usual - 0.5
    ]
    if not limits:
        yield of.skipped("nvidia-smi does not show it")
    elif low:
        yield of.found("warn", listed(low))
    else:
        yield of.passed(listed(sorted({f"{now:.0f} W" for now, _ in limits.values()})))


def _mode(name: str, modes: dict[int, str | None], good: str) -> Finding:
    of = rule(name)
    bad = {index: mode for index, mode in modes.items() if mode and mode != good}
    if not any(modes.values()):
        return of.skipped("nvidia-smi does not show it")
    if not bad:
        return of.passed(good.lower())
    status = "fail" if of.fails_if else "warn"
    return of.found("fail" if status == "fail" else "warn", f"{next(iter(bad.values())).lower()} on {indexes(bad)}")


def _processes(facts: GpuFacts) -> Iterator[Finding]:
    of = rule("gpu_processes")
    if isinstance(facts.processes, Missing):
        yield of.skipped(facts.processes.reason)
    elif facts.processes:
        yield of.found("warn", listed(sorted(set(facts.processes))))
    else:
        yield of.passed("none")

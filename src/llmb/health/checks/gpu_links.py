# SPDX-License-Identifier: Apache-2.0
"""Checks of what connects GPUs: NVLink, its fabric, and PCIe."""

from collections.abc import Iterator, Sequence

from llmb.health.checks.words import listed
from llmb.health.facts.gpus import GpuFacts, LinkErrors, NvLinks
from llmb.health.facts.source import Missing
from llmb.health.rules import Finding, rule
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

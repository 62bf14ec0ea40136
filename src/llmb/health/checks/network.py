# SPDX-License-Identifier: Apache-2.0
"""Checks of network cards, and of those with RDMA, which carry the collectives between nodes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

from llmb.health.checks.words import counted, listed
from llmb.health.facts.network import Card, NetworkFacts, Port
from llmb.health.facts.source import Missing
from llmb.health.rules import Finding, rule
from llmb.health.wanted import WantedFacts

NEEDS_RDMA = ("infiniband", "azure-infiniband")
"""Networks of the catalogue that are nothing but verbs."""
INFINIBAND = "InfiniBand"
FULL_LANES = 4
LOOPBACK = ("127.", "::1")
RDMA_CHECKS = ("network_rdma_rate", "network_rdma_errors", "network_rdma_mtu", "network_gpu_direct")


def network_checks(facts: NetworkFacts, gpus: int, wanted: WantedFacts) -> Iterator[Finding]:
    """``gpus`` are those that this node has."""
    yield _cards(facts.cards)
    yield _card_errors(facts.cards)
    yield _host_name(facts, wanted)
    yield _reachable(facts, wanted)
    if not facts.ports:
        of = rule("network_rdma")
        if wanted.fabric in NEEDS_RDMA:
            yield of.found("fail", f"none; cluster_config.yaml has fabric: {wanted.fabric}", "none")
        else:
            yield of.skipped("no card with RDMA is in /sys/class/infiniband")
        for name in RDMA_CHECKS:
            yield rule(name).skipped("no card with RDMA is in /sys/class/infiniband")
        return
    active = [port for port in facts.ports if port.active]
    yield _ports(facts.ports, active, gpus)
    yield _rates(active, gpus, wanted if len(active) == len(facts.ports) else WantedFacts())
    yield _port_errors(active)
    yield _mtus(active)
    yield _gpu_direct(facts, gpus)


def _cards(cards: Sequence[Card]) -> Finding:
    of = rule("network_cards")
    if not cards:
        return of.skipped("no interface in /sys/class/net has a device")
    up = [card for card in cards if card.up]
    shown = listed(f"{card.name} {_speed(card.mbit_s)}, MTU {card.mtu}" for card in up)
    return of.passed(shown) if up else of.found("fail", f"none of {listed(card.name for card in cards)} is up")


def _speed(mbit_s: int | None) -> str:
    if mbit_s is None:
        return "of unknown rate"
    return f"{mbit_s / 1000:g} Gb/s" if mbit_s >= 1000 else f"{mbit_s} Mb/s"


def _card_errors(cards: Sequence[Card]) -> Finding:
    of = rule("network_errors")
    seen = [card for card in cards if card.packets]
    if not seen:
        return of.skipped("no interface has sent or received packets")
    worst = max(seen, key=lambda card: card.errors / card.packets)
    text = f"{worst.errors:,} of {worst.packets:,} packets ({worst.name})" if worst.errors else "none"
    return of.measured(100 * worst.errors / worst.packets, text)


def _host_name(facts: NetworkFacts, wanted: WantedFacts) -> Finding:
    of = rule("network_host_name")
    if not wanted.cluster:
        return of.skipped("cluster_config.yaml describes no cluster")
    if isinstance(facts.addresses, Missing):
        return of.found("warn", "the host's own name has no address", "none")
    outside = [address for address in facts.addresses if not address.startswith(LOOPBACK)]
    return of.passed(listed(outside)) if outside else of.found("warn", listed(facts.addresses))


def _reachable(facts: NetworkFacts, wanted: WantedFacts) -> Finding:
    """Runs on one node listen on loopback alone, so that only nodes of a cluster are asked."""
    of = rule("network_public_address")
    if not wanted.cluster:
        return of.skipped("cluster_config.yaml describes no cluster")
    if isinstance(facts.own, Missing):
        return of.skipped(facts.own.reason)
    if not facts.own:
        return of.skipped("no interface but loopback has an address")
    public = [f"{name} {address}" for name, address in facts.own if ip_address(address).is_global]
    return of.found("warn", listed(public)) if public else of.passed("none")


def _ports(ports: Sequence[Port], active: Sequence[Port], gpus: int) -> Finding:
    """Unused ports are common: one that is down fails only if fewer are active than there are GPUs."""
    of = rule("network_rdma")
    down = [f"{port.name} {port.state}, {port.physical}" for port in ports if not port.active]
    layers = Counter(port.layer for port in active)
    text = f"{len(active)} of {counted(len(ports), 'port')} active"
    if not down:
        return of.passed(f"{text} ({listed(f'{count} {layer}' for layer, count in layers.items())})")
    few = len(active) < max(gpus, 1)
    return of.found("fail" if few else "warn", f"{text}; {listed(down)}", "" if few else "unused")


def _rates(active: Sequence[Port], gpus: int, wanted: WantedFacts) -> Finding:
    """Slower ports beside one full port a GPU are those of storage. Nothing is ``wanted`` where a port is down, whose
    part of the rate is missing."""
    of = rule("network_rdma_rate")
    known = [port for port in active if port.gbit_s]
    if not known:
        return of.skipped("no port is active")
    groups = Counter((port.layer, port.gbit_s) for port in known)
    text = listed(f"{count} x {rate:g} Gb/s {layer}" for (layer, rate), count in groups.items())
    narrow = [f"{port.name} {port.lanes}X" for port in known if port.lanes and port.lanes < FULL_LANES]
    rates = sorted((port.gbit_s or 0) for port in known if port.layer == INFINIBAND)
    full = sum(rate == rates[-1] for rate in rates)
    mixed = full < len(rates) and full < (gpus or len(rates))
    if narrow:
        return of.found("warn", f"{text}; fewer lanes: {listed(narrow)}", "narrow")
    if mixed:
        return of.found("warn", text, "mixed")
    expected = wanted.gpu.network_gb_s if wanted.gpu else None
    if expected and gpus:
        each = sum(port.gbit_s or 0 for port in known) / 8 / gpus
        if each < expected * 0.99:
            return of.found("warn", f"{text}: {each:.3g} of {expected:g} GB/s a GPU")
    return of.passed(text)


def _port_errors(active: Sequence[Port]) -> Finding:
    of = rule("network_rdma_errors")
    if not any(port.counters for port in active):
        return of.skipped("no active port has counters of errors")
    bad = [
        f"{port.name} {name} {count:,}"
        for port in active
        for name, count in port.counters.items()
        if count > of.limits.get(name, 0)
    ]
    return of.found("warn", listed(bad)) if bad else of.passed("no counter above its threshold")


def _mtus(active: Sequence[Port]) -> Finding:
    """InfiniBand has an MTU of its own, which no interface shows."""
    of = rule("network_rdma_mtu")
    found = {port.name: min(port.mtus) for port in active if port.layer == "Ethernet" and port.mtus}
    if not found:
        return of.skipped("no active port is of RoCE")
    least = min(found.values())
    names = [name for name, mtu in found.items() if mtu == least]
    return of.measured(least, f"{least} ({listed(names)})")


def _gpu_direct(facts: NetworkFacts, gpus: int) -> Finding:
    of = rule("network_gpu_direct")
    if not gpus:
        return of.skipped("this node has no GPU")
    if facts.gpu_direct:
        return of.passed(facts.gpu_direct)
    return of.found("warn", "neither nvidia_peermem nor the open kernel modules are loaded")

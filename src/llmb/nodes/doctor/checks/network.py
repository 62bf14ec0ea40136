# SPDX-License-Identifier: Apache-2.0
"""Checks of network cards, and of RDMA cards, which carry collectives between nodes.

Also checks the host name, public addresses, and the access of network cards to the memory of GPUs.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from llmb.base.shown_text import counted, listed
from llmb.nodes.doctor.facts import FactSource, TargetFacts
from llmb.nodes.doctor.rules import Finding, names_of, rule, skipped

NET, RDMA = "/sys/class/net", "/sys/class/infiniband"
LIMIT_S = 10.0
NOT_OF_NODES = ("lo", "docker")
"""Prefixes of the names of interfaces that NCCL ignores; their addresses are not checked."""
NEEDS_RDMA = ("infiniband", "azure-infiniband")
"""Networks in the catalogue that require RDMA verbs."""
INFINIBAND = "InfiniBand"
FULL_LANES = 4
LOOPBACK = ("127.", "::1")


class Card(NamedTuple):
    """A network interface of a device; ``mbit_s`` is None if unknown, for example if the interface is down."""

    name: str
    up: bool
    mbit_s: int | None
    mtu: int | None
    packets: int
    errors: int


class Port(NamedTuple):
    """A port of an RDMA card."""

    name: str
    layer: str
    """``InfiniBand``, ``Ethernet`` for RoCE, or ``unknown``."""
    state: str
    physical: str
    gbit_s: float | None
    lanes: int | None
    mtus: tuple[int, ...]
    """MTUs of the interfaces that belong to the card."""
    counters: dict[str, int]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


def network_checks(
    source: FactSource, ports: Sequence[Port], node: str, gpus: int, target: TargetFacts
) -> Iterator[Finding]:
    """Check the network of a node with ``gpus`` GPUs."""
    cards = [_card(source, name) for name in source.names(NET) if source.exists(f"{NET}/{name}/device")]
    yield _cards(cards)
    yield _card_errors(cards)
    yield _host_name(source, node, target)
    yield _reachable(source, target)
    if not ports:
        of, why = rule("network_rdma"), "there is no RDMA card in /sys/class/infiniband"
        needed = target.fabric in NEEDS_RDMA
        fabric = f"none; cluster_config.yaml has fabric: {target.fabric}"
        yield of.check("fail", fabric, "none") if needed else of.skipped(why)
        names = names_of("network")
        yield from skipped(names[names.index(of.name) + 1 :], why)
        return
    active = [port for port in ports if port.active]
    yield _ports(ports, active, gpus)
    yield _rates(active, gpus, target if len(active) == len(ports) else TargetFacts())
    yield _port_errors(active)
    yield _mtus(active)
    yield _gpu_direct(source, gpus)


def _card(source: FactSource, name: str) -> Card:
    folder = f"{NET}/{name}"
    speed = source.number(f"{folder}/speed")
    packets, errors = (
        sum(source.number(f"{folder}/statistics/{way}_{what}") or 0 for way in ("rx", "tx"))
        for what in ("packets", "errors")
    )
    return Card(
        name=name,
        up=source.text(f"{folder}/operstate") == "up",
        mbit_s=speed if speed and speed > 0 else None,
        mtu=source.number(f"{folder}/mtu"),
        packets=packets,
        errors=errors,
    )


def read_ports(source: FactSource) -> list[Port]:
    devices = source.names(RDMA)
    return [_port(source, device, port) for device in devices for port in source.names(f"{RDMA}/{device}/ports")]


def _port(source: FactSource, device: str, number: str) -> Port:
    folder, interfaces = f"{RDMA}/{device}/ports/{number}", f"{RDMA}/{device}/device/net"
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec(?: \((\d+)X)?", source.text(f"{folder}/rate") or "")
    mtus = (source.number(f"{interfaces}/{name}/mtu") for name in source.names(interfaces))
    counts = {name: source.number(f"{folder}/counters/{name}") for name in rule("network_rdma_errors").limits}
    return Port(
        name=device if number == "1" else f"{device}:{number}",
        layer=source.text(f"{folder}/link_layer") or "unknown",
        state=_word(source.text(f"{folder}/state")),
        physical=_word(source.text(f"{folder}/phys_state")),
        gbit_s=float(rate[1]) if rate else None,
        lanes=int(rate[2]) if rate and rate[2] else None,
        mtus=tuple(mtu for mtu in mtus if mtu),
        counters={name: count for name, count in counts.items() if count is not None},
    )


def _word(text: str | None) -> str:
    """Return the name in a state such as ``4: ACTIVE``."""
    return (text or "unknown").partition(": ")[2] or text or "unknown"


def _cards(cards: Sequence[Card]) -> Finding:
    of = rule("network_cards")
    if not cards:
        return of.skipped("no interface in /sys/class/net belongs to a device")
    up = [card for card in cards if card.up]
    text = listed(f"{card.name} {_speed(card.mbit_s)}, MTU {card.mtu}" for card in up)
    return of.passed(text) if up else of.check("fail", f"none of {listed(card.name for card in cards)} is up")


def _speed(mbit_s: int | None) -> str:
    if mbit_s is None:
        return "of unknown rate"
    return f"{mbit_s / 1000:g} Gb/s" if mbit_s >= 1000 else f"{mbit_s} Mb/s"


def _card_errors(cards: Sequence[Card]) -> Finding:
    of = rule("network_errors")
    active = [card for card in cards if card.packets]
    if not active:
        return of.skipped("no interface has sent or received packets")
    worst = max(active, key=lambda card: card.errors / card.packets)
    text = f"{worst.errors:,} of {worst.packets:,} packets ({worst.name})" if worst.errors else "none"
    return of.measured(100 * worst.errors / worst.packets, text)


def _host_name(source: FactSource, node: str, target: TargetFacts) -> Finding:
    of = rule("network_host_name")
    if not target.cluster:
        return of.skipped("cluster_config.yaml describes no cluster")
    output = source.ask(["getent", "ahosts", node], LIMIT_S)
    if output.problem:
        return of.check("warn", "the host name does not resolve to an address", "none")
    addresses = dict.fromkeys(line.split()[0] for line in output.text.splitlines() if line.strip())
    outside = [address for address in addresses if not address.startswith(LOOPBACK)]
    return of.passed(listed(outside)) if outside else of.check("warn", listed(addresses))


def _reachable(source: FactSource, target: TargetFacts) -> Finding:
    """Check for public addresses, except on a single machine, where runs listen only on loopback.

    Lines have the form ``2: eth0    inet 10.1.2.3/16 brd ...``; the peer of a point-to-point link does not match.
    """
    of = rule("network_public_address")
    if not target.cluster:
        return of.skipped("cluster_config.yaml describes no cluster")
    output = source.ask(["ip", "-o", "address", "show", "up"], LIMIT_S)
    if output.problem:
        return of.skipped(output.problem)
    addresses = re.findall(r"^\d+: (\S+)\s+inet6? ([0-9a-fA-F:.]+)", output.text, re.MULTILINE)
    outside = [(name, address) for name, address in addresses if not name.startswith(NOT_OF_NODES)]
    if not outside:
        return of.skipped("no interface but loopback has an address")
    public = [f"{name} {address}" for name, address in outside if ip_address(address).is_global]
    return of.check("warn", listed(public)) if public else of.passed("none")


def _ports(ports: Sequence[Port], active: Sequence[Port], gpus: int) -> Finding:
    of = rule("network_rdma")
    down = [f"{port.name} {port.state}, {port.physical}" for port in ports if not port.active]
    layers = Counter(port.layer for port in active)
    text = f"{len(active)} of {counted(len(ports), 'port')} active"
    if not down:
        return of.passed(f"{text} ({listed(f'{count} {layer}' for layer, count in layers.items())})")
    few = len(active) < max(gpus, 1)
    return of.check("fail" if few else "warn", f"{text}; {listed(down)}", "" if few else "unused")


def _rates(active: Sequence[Port], gpus: int, target: TargetFacts) -> Finding:
    """Check the rates of active ports; slower ones may be for storage if each GPU has a full-rate port. ``target`` must
    be empty if a port is down, because the total then lacks the port's rate."""
    of = rule("network_rdma_rate")
    rated = [port for port in active if port.gbit_s]
    if not rated:
        return of.skipped("no port is active")
    groups = Counter((port.layer, port.gbit_s) for port in rated)
    text = listed(f"{count} x {rate:g} Gb/s {layer}" for (layer, rate), count in groups.items())
    narrow = [f"{port.name} {port.lanes}X" for port in rated if port.lanes and port.lanes < FULL_LANES]
    rates = sorted((port.gbit_s or 0) for port in rated if port.layer == INFINIBAND)
    full = sum(rate == rates[-1] for rate in rates)
    mixed = full < len(rates) and full < (gpus or len(rates))
    if narrow:
        return of.check("warn", f"{text}; fewer lanes: {listed(narrow)}", "narrow")
    if mixed:
        return of.check("warn", text, "mixed")
    expected = target.gpu.network_gb_s if target.gpu else None
    if expected and gpus:
        each = sum(port.gbit_s or 0 for port in rated) / 8 / gpus
        if each < expected * 0.99:
            return of.check("warn", f"{text}: {each:.3g} of {expected:g} GB/s per GPU")
    return of.passed(text)


def _port_errors(active: Sequence[Port]) -> Finding:
    of = rule("network_rdma_errors")
    if not any(port.counters for port in active):
        return of.skipped("no active port has error counters")
    bad = [
        f"{port.name} {name} {count:,}"
        for port in active
        for name, count in port.counters.items()
        if count > of.limits.get(name, 0)
    ]
    return of.check("warn", listed(bad)) if bad else of.passed("no counter above its threshold")


def _mtus(active: Sequence[Port]) -> Finding:
    """Check the MTUs of RoCE ports; interfaces do not report the MTUs of InfiniBand ports."""
    of = rule("network_rdma_mtu")
    mtus = {port.name: min(port.mtus) for port in active if port.layer == "Ethernet" and port.mtus}
    if not mtus:
        return of.skipped("no active port uses RoCE")
    least = min(mtus.values())
    names = [name for name, mtu in mtus.items() if mtu == least]
    return of.measured(least, f"{least} ({listed(names)})")


def _gpu_direct(source: FactSource, gpus: int) -> Finding:
    of = rule("network_gpu_direct")
    if not gpus:
        return of.skipped("this node has no GPU")
    modules = {line.split()[0] for line in (source.text("/proc/modules") or "").splitlines() if line.strip()}
    for name in ("nvidia_peermem", "nv_peer_mem"):
        if name in modules:
            return of.passed(name)
    if "Open Kernel Module" in (source.text("/proc/driver/nvidia/version") or ""):
        return of.passed("DMA-BUF of the open kernel modules")
    return of.check("warn", "neither nvidia_peermem nor the open kernel modules are loaded")

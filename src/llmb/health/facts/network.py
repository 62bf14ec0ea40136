# SPDX-License-Identifier: Apache-2.0
"""Network cards and their ports, from /sys/class/net and /sys/class/infiniband."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from llmb.health.facts.source import FactSource, Missing
from llmb.tools import Said

NET, RDMA = "/sys/class/net", "/sys/class/infiniband"
LIMIT_S = 10.0
NOT_OF_NODES = ("lo", "docker")
COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)


class Card(NamedTuple):
    """A network interface of a device. ``mbit_s`` is None where the driver reports none, as if it is down."""

    name: str
    up: bool
    mbit_s: int | None
    mtu: int | None
    packets: int
    errors: int


class Port(NamedTuple):
    """A port of a card with RDMA."""

    device: str
    number: str
    layer: str
    """``InfiniBand``, or ``Ethernet`` for RoCE."""
    state: str
    physical: str
    gbit_s: float | None
    lanes: int | None
    mtus: tuple[int, ...]
    """MTUs of the interfaces of its device."""
    counters: dict[str, int]

    @property
    def name(self) -> str:
        return self.device if self.number == "1" else f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    cards: tuple[Card, ...]
    ports: tuple[Port, ...]
    gpu_direct: str | None
    """What lets network cards read the memory of GPUs; None if nothing does."""
    addresses: tuple[str, ...] | Missing
    """Addresses of the host's own name."""
    own: tuple[tuple[str, str], ...] | Missing
    """Interface and address of each that is up; without loopback, and docker's bridges, which NCCL leaves out too."""


def read_network(source: FactSource, node: str) -> NetworkFacts:
    cards = (name for name in source.names(NET) if source.exists(f"{NET}/{name}/device"))
    devices = source.names(RDMA)
    return NetworkFacts(
        cards=tuple(_card(source, name) for name in cards),
        ports=tuple(
            _port(source, device, port) for device in devices for port in source.names(f"{RDMA}/{device}/ports")
        ),
        gpu_direct=_gpu_direct(source),
        addresses=_addresses(source.ask(["getent", "ahosts", node], LIMIT_S)),
        own=_own_addresses(source.ask(["ip", "-o", "address", "show", "up"], LIMIT_S)),
    )


def _card(source: FactSource, name: str) -> Card:
    folder = f"{NET}/{name}"
    speed = source.number(f"{folder}/speed")
    counts = {
        counter: source.number(f"{folder}/statistics/{counter}") or 0
        for counter in ("rx_packets", "tx_packets", "rx_errors", "tx_errors")
    }
    return Card(
        name=name,
        up=source.text(f"{folder}/operstate") == "up",
        mbit_s=speed if speed and speed > 0 else None,
        mtu=source.number(f"{folder}/mtu"),
        packets=counts["rx_packets"] + counts["tx_packets"],
        errors=counts["rx_errors"] + counts["tx_errors"],
    )


def _port(source: FactSource, device: str, number: str) -> Port:
    folder = f"{RDMA}/{device}/ports/{number}"
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec(?: \((\d+)X)?", source.text(f"{folder}/rate") or "")
    interfaces = source.names(f"{RDMA}/{device}/device/net")
    mtus = (source.number(f"{RDMA}/{device}/device/net/{name}/mtu") for name in interfaces)
    counts = {name: source.number(f"{folder}/counters/{name}") for name in COUNTERS}
    return Port(
        device=device,
        number=number,
        layer=source.text(f"{folder}/link_layer") or "unknown",
        state=_word(source.text(f"{folder}/state")),
        physical=_word(source.text(f"{folder}/phys_state")),
        gbit_s=float(rate[1]) if rate else None,
        lanes=int(rate[2]) if rate and rate[2] else None,
        mtus=tuple(mtu for mtu in mtus if mtu),
        counters={name: count for name, count in counts.items() if count is not None},
    )


def _word(text: str | None) -> str:
    """The word of a state such as ``4: ACTIVE``."""
    return (text or "unknown").partition(": ")[2] or text or "unknown"


def _gpu_direct(source: FactSource) -> str | None:
    modules = {line.split()[0] for line in (source.text("/proc/modules") or "").splitlines() if line.strip()}
    for name in ("nvidia_peermem", "nv_peer_mem"):
        if name in modules:
            return name
    driver = source.text("/proc/driver/nvidia/version") or ""
    return "DMA-BUF of the open kernel modules" if "Open Kernel Module" in driver else None


def _addresses(said: Said) -> tuple[str, ...] | Missing:
    if said.problem:
        return Missing(said.problem)
    return tuple(dict.fromkeys(line.split()[0] for line in said.text.splitlines() if line.strip()))


def _own_addresses(said: Said) -> tuple[tuple[str, str], ...] | Missing:
    """From lines such as ``2: eth0    inet 10.1.2.3/16 brd ...``; the peer of a point-to-point link is not one."""
    if said.problem:
        return Missing(said.problem)
    found = re.findall(r"^\d+: (\S+)\s+inet6? ([0-9a-fA-F:.]+)", said.text, re.MULTILINE)
    return tuple((name, address) for name, address in found if not name.startswith(NOT_OF_NODES))

# SPDX-License-Identifier: Apache-2.0
"""Determines the network that NCCL used from its log with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.base.missing import Missing
from llmb.base.record import Record
from llmb.base.shown_text import counted, listed
from llmb.catalogue.data_files import read_file
from llmb.readers.nccl.nccl_log import Readable, whole_lines

MOST_NODES = 20_000
MOST_NAMES = 1000
"""Maximum number of device names, networks and channels of a node, and of sizes of communicators."""
VERBS = "IB"
"""The name under which plugins for verbs may list their devices."""
_NET = rb"([A-Za-z0-9][\w.+-]{0,40}(?: [\w.+-]{1,40})?)"
_DEVICE = rb"([\w.+-]{1,128})"
_LINE = re.compile(
    rb"\[(\d{1,5})\] NCCL INFO ((?:NET/|Using network |Channel |CollNet |NCCL version |MNNVL |\d{1,5} coll channels"
    rb"|(?:\[Rank \d{1,9}\] )?(?:ncclComm\w{1,40} )?comm )[^\r\n]{1,3000})"
)
_HOST = re.compile(rb"[\w.<>@-]{1,255}")
_LONGEST_WRITER = 300
_VERSION = re.compile(rb"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})\b")
_ITEM = re.compile(rb"\[(\d{1,4})\](?:=\{([^}\r\n]{1,500})\}|([^\s;]{1,300}))")
_PORT = re.compile(rb"([\w.-]{1,64}):\d{1,3}/(IB|RoCE)\b")
_INTERFACE = re.compile(rb"([\w.-]{1,64}):")
Match = re.Match[bytes]
NAMES = Path(__file__).parent / "data" / "networks.yaml"
MOST_BYTES = 1 << 25
"""Maximum bytes of a log to search; NCCL prints the network at the beginning."""
TCP = "TCP sockets"
NVLINK = "NVLink"
"""The fabric of nodes that NVLink connects with each other."""
LINK_LAYERS = {"IB": "InfiniBand", "RoCE": "RoCE"}
NO_CHANNELS = "the log has no line about a channel over the network"
OF_DEVICES = {
    "devices": "the log does not name them",
    "devices_used": f"{NO_CHANNELS}, or does not name its device",
    "idle_devices": "the log does not cover all ranks of each node, and the others may use them",
}
DIFFERENT = "it differs between nodes"
UNKNOWN = "unknown"


@dataclass(slots=True)
class NodeFacts:
    """The facts about the network that the processes of a node logged."""

    selected: dict[str, None] = field(default_factory=dict)
    """Networks assigned to communicators."""
    channels: set[tuple[str, int]] = field(default_factory=set)
    """Network and device index of each channel over the network."""
    direct: Counter[bool] = field(default_factory=Counter)
    """Number of channels over the network with GPUDirect RDMA (True) and without (False)."""
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """Names of devices by network and index; the names of devices that NCCL combines are joined by ``+``."""
    layers: dict[str, str] = field(default_factory=dict)
    processes: set[bytes] = field(default_factory=set)
    nvlink: bool = False
    """True if a channel uses NVLink to another node."""

    def names_of(self, network: str, index: int) -> tuple[str, ...]:
        name = self.names.get((network, index)) or self.names.get((VERBS, index))
        return tuple(name.split("+")) if name else ()

    def devices_of(self, network: str) -> tuple[str, ...]:
        owner = network if any(name == network for name, _ in self.names) else VERBS
        indices = sorted(index for name, index in self.names if name == owner)
        return tuple(device for index in indices for device in self.names_of(owner, index))

    def name(self, network: str, index: int, device: str) -> None:
        if len(self.names) < MOST_NAMES:
            self.names[network, index] = device


@dataclass(slots=True)
class NetworkFacts:
    """The network facts in NCCL logs; None, False or empty if the logs do not contain them."""

    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    plugin_version: str | None = None
    provider: str | None = None
    """The provider of libfabric, such as ``efa``."""
    coll: int | None = None
    nvls: int | None = None
    p2p: int | None = None
    mnnvl: bool | None = None
    collnet: bool = False
    communicators: dict[int, set[int]] = field(default_factory=dict)
    """The ranks that wrote lines, by the size of their communicator."""
    unread_lines: int = 0
    """Number of lines without the writing process, such as one interrupted by another line."""

    def node(self, name: str) -> NodeFacts | None:
        if name not in self.nodes and len(self.nodes) >= MOST_NODES:
            return None
        return self.nodes.setdefault(name, NodeFacts())

    def is_whole(self, ranks: int | None) -> bool:
        """Return whether the logs contain lines of all ranks; ``ranks`` is their number, or None if unknown."""
        if ranks is not None:
            return sum(len(node.processes) for node in self.nodes.values()) >= ranks
        most = max(self.communicators, default=0)
        return most > len(self.nodes) and len(self.communicators[most]) == most


def parse_lines(text: bytes, facts: NetworkFacts) -> None:
    """Add the facts in NCCL's lines of ``text``, which consists of complete lines, to ``facts``."""
    if b"NCCL " not in text:
        return
    facts.versions.update(version.decode() for version in _VERSION.findall(text))
    for line in _LINE.finditer(text):
        writer = _writer(text[max(0, line.start() - _LONGEST_WRITER) : line.start()])
        if writer is None:
            facts.unread_lines += 1
            continue
        if (node := facts.node(writer[0])) is None:
            continue
        node.processes.add(writer[1])
        for pattern, note in RULES:
            if match := pattern.match(line[2]):
                note(facts, node, match)


def _writer(before: bytes) -> tuple[str, bytes] | None:
    words = before[:-1].rpartition(b" ")[2].rpartition(b"\n")[2].split(b":")[-3:]
    if len(words) < 3 or not before.endswith(b" "):
        return None
    host, process, thread = words
    if not (process.isdigit() and thread.isdigit() and _HOST.fullmatch(host)):
        return None
    return host.decode(), process


def _selected(_facts: NetworkFacts, node: NodeFacts, match: Match) -> None:
    if len(node.selected) < MOST_NAMES:
        node.selected[match[1].decode()] = None


def _devices(_facts: NetworkFacts, node: NodeFacts, match: Match) -> None:
    """Add devices: ``[0]mlx5_0:1/IB``, ``[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}``, ``[0]eth0:10.0.0.7<0>``."""
    for index, joined, single in _ITEM.findall(match[2]):
        ports = _PORT.findall(joined or single)
        node.layers.update({name.decode(): layer.decode() for name, layer in ports[:MOST_NAMES]})
        names = [name for name, _ in ports] or _INTERFACE.findall(single)[:1]
        if names:
            node.name(match[1].decode(), int(index), b"+".join(names).decode())


def _device(_facts: NetworkFacts, node: NodeFacts, match: Match) -> None:
    node.name(match[1].decode(), int(match[2]), match[3].decode())


def _merged(_facts: NetworkFacts, node: NodeFacts, match: Match) -> None:
    node.name(VERBS, int(match[1]), match[2].decode())


def _channel(_facts: NetworkFacts, node: NodeFacts, match: Match) -> None:
    if len(node.channels) < MOST_NAMES:
        node.channels.add((match[1].decode(), int(match[2])))
    node.direct[b"GDRDMA" in match[3]] += 1


def _nvlink_channel(facts: NetworkFacts, node: NodeFacts, _match: Match) -> None:
    facts.mnnvl = node.nvlink = True


def _mnnvl(facts: NetworkFacts, _node: NodeFacts, match: Match) -> None:
    facts.mnnvl = facts.mnnvl or match[1] != b"0"


def _collnet(facts: NetworkFacts, _node: NodeFacts, _match: Match) -> None:
    facts.collnet = True


def _channels(facts: NetworkFacts, _node: NodeFacts, match: Match) -> None:
    coll, nvls, p2p = (None if each is None else int(each) for each in match.groups())
    facts.nvls = nvls if facts.nvls is None else max(facts.nvls, nvls or 0)
    if facts.coll is None or (coll or 0) > facts.coll:
        facts.coll, facts.p2p = coll, p2p


def _rank(facts: NetworkFacts, _node: NodeFacts, match: Match) -> None:
    if len(facts.communicators) < MOST_NAMES or int(match[2]) in facts.communicators:
        facts.communicators.setdefault(int(match[2]), set()).add(int(match[1]))


def _plugin_version(facts: NetworkFacts, _node: NodeFacts, match: Match) -> None:
    facts.plugin_version = match[1].decode().rstrip(".")


def _provider(facts: NetworkFacts, _node: NodeFacts, match: Match) -> None:
    facts.provider = match[1].decode()


RULES: tuple[tuple["re.Pattern[bytes]", Callable[[NetworkFacts, NodeFacts, Match], None]], ...] = (
    (re.compile(rb"Using network %s\s*\Z" % _NET), _selected),
    (re.compile(rb"NET/%s ?: Using((?: \[\d{1,4}\](?:=\{[^}\r\n]{1,500}\}|[^\s;]{1,300}))+)" % _NET), _devices),
    (re.compile(rb"NET/%s ?: GPU Direct RDMA \w{7,8} for HCA (\d{1,4}) '%s'" % (_NET, _DEVICE)), _device),
    (re.compile(rb"NET/IB : Made virtual device \[(\d{1,4})\] name=%s " % _DEVICE), _merged),
    (re.compile(rb"Channel [^\r\n]{1,60}? via NET/%s/(\d{1,4})(?:\(\d{1,9}\))?([/\w()]{0,60})" % _NET), _channel),
    (re.compile(rb"Channel [^\r\n]{1,60}? via P2P/MNNVL"), _nvlink_channel),
    (re.compile(rb"comm [^\r\n]{1,120} MNNVL (\d)"), _mnnvl),
    (re.compile(rb"MNNVL (\d) cliqueId"), _mnnvl),
    (re.compile(rb"CollNet [^\r\n]{1,60}? via COLLNET/"), _collnet),
    (
        re.compile(
            rb"(\d{1,5}) coll channels(?:, \d{1,5} collnet channels)?(?:, (\d{1,5}) nvls channels)?"
            rb"(?:, (\d{1,5}) p2p channels)?"
        ),
        _channels,
    ),
    (
        re.compile(rb"(?:\[Rank \d{1,9}\] )?(?:ncclComm\w{1,40} )?comm \S{1,40} rank (\d{1,9}) n[Rr]anks (\d{1,9}) "),
        _rank,
    ),
    (
        re.compile(
            rb"NET/(?:OFI (?:Initializing|Using) aws-ofi-nccl|gIB : Initializing gIB|GPUDirectTCPX ver\.) "
            rb"v?(\w[\w.+-]{0,63})"
        ),
        _plugin_version,
    ),
    (re.compile(rb"NET/OFI Selected [Pp]rovider is ([\w;.-]{1,64})"), _provider),
)


class NetworkKind(Record):
    """A kind of network, with patterns of NCCL's names for such networks."""

    names: tuple[str, ...]
    fabric: str | None = None
    by: Literal["name", "link_layer", "provider"] = "name"


class NetworkNames(Record):
    """The content of ``networks.yaml``."""

    networks: tuple[NetworkKind, ...]
    internal: tuple[str, ...]
    providers: dict[str, str]

    def kind_of(self, name: str) -> NetworkKind | None:
        return next((one for one in self.networks if any(fnmatchcase(name, each) for each in one.names)), None)


@cache
def network_names() -> NetworkNames:
    return read_file(NAMES, NetworkNames)


class Channels(Record):
    """Numbers of channels of the communicator with the most collective channels; ``nvls`` is the maximum of all
    communicators.
    """

    collective: int
    nvls: int | None
    point_to_point: int | None


class NodesNetwork(Record):
    """The network of a group of nodes, which have equal values in all fields."""

    nodes: tuple[str, ...]
    fabric: str | None
    transport: str | None
    link_layer: str | None
    gpudirect: bool | None
    devices: tuple[str, ...] | None
    """All devices that NCCL found for this network."""
    devices_used: tuple[str, ...] | None
    """Devices that channels of the logged ranks use."""
    idle_devices: tuple[str, ...] | None
    """Devices without a channel; None if they are unknown."""


class Network(Record):
    """The network that NCCL used. ``reasons`` has the reason for each None, here or in ``nodes``, by field."""

    used: tuple[str, ...]
    """Fabrics, or NCCL's names of unknown ones; the fabric of most nodes is first."""
    devices: tuple[str, ...] | None
    """All devices that NCCL found on any node."""
    idle_devices: tuple[str, ...] | None
    """Devices that at least one node left idle; None if they are unknown for all nodes."""
    source: str
    """The logs in which NCCL reported the network."""
    fabric: str | None
    """For example InfiniBand, RoCE, EFA or TCP sockets."""
    transport: str | None
    """The transport, in NCCL's words."""
    link_layer: str | None
    plugin: str | None
    """``internal`` if it is part of NCCL."""
    plugin_version: str | None
    nccl_version: str | None
    gpudirect: bool | None
    """True if network cards access the memory of GPUs directly."""
    nvls: bool | None
    """True if NVLink switches reduce data (NVLink SHARP)."""
    mnnvl: bool | None
    """True if NVLink connects several nodes."""
    collnet: bool | None
    """True if network switches reduce data, as with SHARP."""
    channels: Channels | None
    nodes: tuple[NodesNetwork, ...]
    """Groups of nodes with the same network, the largest group first."""
    reasons: dict[str, str]
    unread_lines: int = 0
    """Number of lines ignored because they do not contain the writing process."""


def read_network(texts: Iterable[bytes], source: str, ranks: int | None = None) -> Network | Missing:
    """Determine the network of a run of ``ranks`` ranks (None: unknown); Missing if ``texts`` do not report it."""
    facts = NetworkFacts()
    for text in texts:
        parse_lines(text, facts)
    return network_of(facts, source, ranks)


def source_of(names: Sequence[str]) -> str:
    """Return a string such as ``rank-0.log and 7 more``."""
    return listed(names, 1)


def beginning(stream: Readable) -> Iterator[bytes]:
    """Yield chunks of complete lines from the beginning of a log, up to about ``MOST_BYTES``."""
    for position, text in whole_lines(stream):
        yield text
        if position + len(text) >= MOST_BYTES:
            return


def network_of(facts: NetworkFacts, source: str, ranks: int | None = None) -> Network | Missing:
    evident = {name: node for name, node in facts.nodes.items() if node.selected or node.channels or node.nvlink}
    if not evident:
        unread = f": {counted(facts.unread_lines, 'line')} of it cannot be read" if facts.unread_lines else ""
        return Missing(f"{source} does not report NCCL's network{unread}")
    whole = facts.is_whole(ranks)
    nodes = _grouped({name: _node(node, facts, whole=whole) for name, node in evident.items()})
    common = {name: _common(nodes, name) for name in ("fabric", "transport", "link_layer", "gpudirect")}
    transport = common["transport"]
    plugin = _plugin(transport) if isinstance(transport, str) else None
    values = {
        **common,
        "used": tuple(dict.fromkeys(node.fabric or node.transport or UNKNOWN for node in nodes)),
        "devices": _of_any(nodes, "devices"),
        "idle_devices": _of_any(nodes, "idle_devices"),
        "source": source,
        "plugin": plugin,
        "plugin_version": facts.plugin_version if plugin not in (None, "internal") else None,
        "nccl_version": ", ".join(sorted(facts.versions)) or None,
        "nvls": None if facts.nvls is None else facts.nvls > 0,
        "mnnvl": facts.mnnvl,
        "collnet": facts.collnet or (False if facts.coll is not None else None),
        "channels": _channels_of_run(facts),
    }
    reasons = {name: _reason(name, nodes, plugin, facts) for name, value in values.items() if value is None}
    reasons |= {name: why for name, why in OF_DEVICES.items() if None in {getattr(node, name) for node in nodes}}
    return Network.model_validate({**values, "nodes": nodes, "reasons": reasons, "unread_lines": facts.unread_lines})


def _channels_of_run(facts: NetworkFacts) -> Channels | None:
    if facts.coll is None:
        return None
    return Channels(collective=facts.coll, nvls=facts.nvls, point_to_point=facts.p2p)


def _grouped(nodes: Mapping[str, NodesNetwork]) -> tuple[NodesNetwork, ...]:
    groups: dict[NodesNetwork, list[str]] = {}
    for name, network in sorted(nodes.items()):
        groups.setdefault(network, []).append(name)
    whole = [network.model_copy(update={"nodes": tuple(names)}) for network, names in groups.items()]
    return tuple(sorted(whole, key=lambda group: -len(group.nodes)))


def _common(nodes: Iterable[NodesNetwork], name: str) -> object:
    values = {getattr(node, name) for node in nodes}
    return values.pop() if len(values) == 1 else None


def _of_any(nodes: Iterable[NodesNetwork], name: str) -> tuple[str, ...] | None:
    lists: list[tuple[str, ...]] = [devices for node in nodes if (devices := getattr(node, name)) is not None]
    return tuple(dict.fromkeys(device for devices in lists for device in devices)) if lists else None


def _node(node: NodeFacts, facts: NetworkFacts, *, whole: bool) -> NodesNetwork:
    used = sorted({name for name, _ in node.channels})
    names = used or ([] if node.nvlink or facts.mnnvl else list(node.selected))
    devices = tuple(dict.fromkeys(device for name in names for device in node.devices_of(name))) or None
    busy = _busy(node)
    layers = {node.layers[device] for device in busy or devices or () if device in node.layers}
    link_layer = " and ".join(sorted(LINK_LAYERS[layer] for layer in layers)) or None
    direct = set(node.direct)
    return NodesNetwork(
        nodes=(),
        fabric=_joined(_fabric(name, link_layer, facts.provider) for name in names) if names else NVLINK,
        transport=" and ".join(names) or "MNNVL",
        link_layer=link_layer,
        gpudirect=direct.pop() if len(direct) == 1 else None,
        devices=devices,
        devices_used=busy,
        idle_devices=tuple(one for one in devices if one not in busy) if whole and devices and busy else None,
    )


def _busy(node: NodeFacts) -> tuple[str, ...] | None:
    devices = [node.names_of(name, index) for name, index in sorted(node.channels)]
    return tuple(dict.fromkeys(one for names in devices for one in names)) if devices and all(devices) else None


def _joined(fabrics: Iterable[str | None]) -> str | None:
    every = list(dict.fromkeys(fabrics))
    return None if None in every else " and ".join(filter(None, every))


def _fabric(name: str, link_layer: str | None, provider: str | None) -> str | None:
    kind = network_names().kind_of(name)
    if kind is None:
        return name
    if kind.by == "link_layer":
        return link_layer
    if kind.by == "provider":
        return network_names().providers.get((provider or "").partition(";")[0])
    return kind.fabric


def _plugin(transport: str) -> str:
    return "internal" if set(transport.split(" and ")) <= {*network_names().internal, "MNNVL"} else transport


def _reason(name: str, nodes: Iterable[NodesNetwork], plugin: str | None, facts: NetworkFacts) -> str:
    if name == "plugin_version" and plugin == "internal":
        return "the transport is part of NCCL and has NCCL's version"
    if name in NodesNetwork.model_fields and len({getattr(node, name) for node in nodes}) > 1:
        return DIFFERENT
    return {
        "gpudirect": _mixed(facts) or NO_CHANNELS,
        "fabric": "the log does not report the link layer or the provider of this network",
        "link_layer": "not in the log",
        "plugin": DIFFERENT,
    }.get(name, "not in the log")


def _mixed(facts: NetworkFacts) -> str | None:
    every = [direct for node in facts.nodes.values() for direct in node.direct.elements()]
    return f"{sum(every)} of {len(every)} channels use it" if any(every) else None

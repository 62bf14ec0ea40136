# SPDX-License-Identifier: Apache-2.0
"""Reads NCCL's lines of initialization and network one by one; ``nccl_network`` tells what they mean together.

Names of devices, networks and nodes are taken only if they have no other characters than such names have.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_NODES = 20_000
MOST_NAMES = 1000
"""The most names of devices of a node, and of networks."""
VERBS = "IB"
"""Plugins for verbs may write their list of devices in this name."""
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


@dataclass(slots=True)
class HeardNode:
    """What the processes of a node wrote."""

    selected: dict[str, None] = field(default_factory=dict)
    """Networks that communicators were given."""
    channels: set[tuple[str, int]] = field(default_factory=set)
    """Network and number of the device."""
    direct: Counter[bool] = field(default_factory=Counter)
    """Channels over the network with GPUDirect RDMA and without it."""
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """Names of devices; those of several that NCCL uses as one are joined by ``+``."""
    layers: dict[str, str] = field(default_factory=dict)
    processes: set[bytes] = field(default_factory=set)
    nvlink: bool = False
    """A channel goes over NVLink to another node."""

    def names_of(self, network: str, index: int) -> tuple[str, ...]:
        named = self.names.get((network, index)) or self.names.get((VERBS, index))
        return tuple(named.split("+")) if named else ()

    def found(self, network: str) -> tuple[str, ...]:
        own = network if any(name == network for name, _ in self.names) else VERBS
        indices = sorted(index for name, index in self.names if name == own)
        return tuple(device for index in indices for device in self.names_of(own, index))

    def name(self, network: str, index: int, device: str) -> None:
        if len(self.names) < MOST_NAMES:
            self.names[network, index] = device


@dataclass(slots=True)
class Heard:
    """What NCCL wrote in one or several logs. None is what no line tells."""

    nodes: dict[str, HeardNode] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    plugin_version: str | None = None
    provider: str | None = None
    """What libfabric uses, such as ``efa``."""
    coll: int | None = None
    nvls: int | None = None
    p2p: int | None = None
    mnnvl: bool | None = None
    collnet: bool = False
    communicators: dict[int, set[int]] = field(default_factory=dict)
    """The ranks that wrote, by the number of ranks of their communicator."""

    def node(self, name: str) -> HeardNode | None:
        if name not in self.nodes and len(self.nodes) >= MOST_NODES:
            return None
        return self.nodes.setdefault(name, HeardNode())

    def is_whole(self, ranks: int | None) -> bool:
        """Whether all ranks wrote; without their number, whether all of the largest communicator did.

        One with a rank per node tells nothing of the other ranks.
        """
        if ranks is not None:
            return sum(len(node.processes) for node in self.nodes.values()) >= ranks
        most = max(self.communicators, default=0)
        return most > len(self.nodes) and len(self.communicators[most]) == most


def hear(text: bytes, heard: Heard) -> None:
    """Adds what whole lines of a log tell; those of others than NCCL tell nothing."""
    if b"NCCL " not in text:
        return
    heard.versions.update(version.decode() for version in _VERSION.findall(text))
    for line in _LINE.finditer(text):
        host, process = _writer(text[max(0, line.start() - _LONGEST_WRITER) : line.start()])
        if (node := heard.node(host)) is None:
            continue
        node.processes.add(process or line[1])
        for pattern, note in RULES:
            if match := pattern.match(line[2]):
                note(heard, node, match)


def _writer(before: bytes) -> tuple[str, bytes]:
    """Host and process, as in ``node7:4001:4123 `` at the end of ``before``; empty if they are not there."""
    *rest, process, thread = before[:-1].rpartition(b" ")[2].rpartition(b"\n")[2].split(b":")[-3:] or (b"", b"")
    if not rest or not (process.isdigit() and thread.isdigit()) or not _HOST.fullmatch(rest[0]):
        return "", b""
    return rest[0].decode(), process


Match = re.Match[bytes]


def _selected(_heard: Heard, node: HeardNode, match: Match) -> None:
    if len(node.selected) < MOST_NAMES:
        node.selected[match[1].decode()] = None


def _devices(_heard: Heard, node: HeardNode, match: Match) -> None:
    """``[0]mlx5_0:1/IB``, ``[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}``, or ``[0]eth0:10.0.0.7<0>``."""
    for index, joined, single in _ITEM.findall(match[2]):
        ports = _PORT.findall(joined or single)
        node.layers.update({name.decode(): layer.decode() for name, layer in ports[:MOST_NAMES]})
        names = [name for name, _ in ports] or _INTERFACE.findall(single)[:1]
        if names:
            node.name(match[1].decode(), int(index), b"+".join(names).decode())


def _device(_heard: Heard, node: HeardNode, match: Match) -> None:
    node.name(match[1].decode(), int(match[2]), match[3].decode())


def _merged(_heard: Heard, node: HeardNode, match: Match) -> None:
    node.name(VERBS, int(match[1]), match[2].decode())


def _channel(_heard: Heard, node: HeardNode, match: Match) -> None:
    if len(node.channels) < MOST_NAMES:
        node.channels.add((match[1].decode(), int(match[2])))
    node.direct[b"GDRDMA" in match[3]] += 1


def _nvlink_channel(heard: Heard, node: HeardNode, _match: Match) -> None:
    heard.mnnvl = node.nvlink = True


def _mnnvl(heard: Heard, _node: HeardNode, match: Match) -> None:
    heard.mnnvl = heard.mnnvl or match[1] != b"0"


def _collnet(heard: Heard, _node: HeardNode, _match: Match) -> None:
    heard.collnet = True


def _channels(heard: Heard, _node: HeardNode, match: Match) -> None:
    coll, nvls, p2p = (None if each is None else int(each) for each in match.groups())
    heard.nvls = nvls if heard.nvls is None else max(heard.nvls, nvls or 0)
    if heard.coll is None or (coll or 0) > heard.coll:
        heard.coll, heard.p2p = coll, p2p


def _rank(heard: Heard, _node: HeardNode, match: Match) -> None:
    if len(heard.communicators) < MOST_NAMES or int(match[2]) in heard.communicators:
        heard.communicators.setdefault(int(match[2]), set()).add(int(match[1]))


def _plugin_version(heard: Heard, _node: HeardNode, match: Match) -> None:
    heard.plugin_version = match[1].decode().rstrip(".")


def _provider(heard: Heard, _node: HeardNode, match: Match) -> None:
    heard.provider = match[1].decode()


RULES: tuple[tuple["re.Pattern[bytes]", Callable[[Heard, HeardNode, Match], None]], ...] = (
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

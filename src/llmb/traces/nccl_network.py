# SPDX-License-Identifier: Apache-2.0
"""Tells which network NCCL used, by the lines that it writes with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET.

``node7:4001:4123 [3] NCCL INFO Channel 00/0 : 3[3] -> 11[3] [send] via NET/IB/3/GDRDMA``. Formats: NCCL from 2.19 on,
``src/init.cc``, ``src/plugin/net.cc``, ``src/graph/topo.cc`` and ``src/transport``; aws-ofi-nccl from 1.5 on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.record import Record
from llmb.traces.nccl_heard import Heard, HeardNode, hear
from llmb.traces.nccl_log import Readable, whole_lines

NAMES = Path(__file__).parent / "data" / "networks.yaml"
MOST_BYTES = 1 << 25
"""How much of a run's log is searched: NCCL says it when communicators are made, at the beginning."""
TCP = "TCP sockets"
NVLINK = "NVLink"
"""The fabric of nodes that NVLink connects with each other."""
LINK_LAYERS = {"IB": "InfiniBand", "RoCE": "RoCE"}
NO_CHANNELS = "the log has no line of a channel over the network"
OF_DEVICES = {
    "devices": "the log does not name them",
    "devices_used": f"{NO_CHANNELS}, or does not name its device",
    "idle_devices": "the log is not of all ranks of each node, and others may use them",
}
DIFFERENT = "it differs between nodes"
UNKNOWN = "unknown"


class NamedNetwork(Record):
    """What networks with these names are."""

    names: tuple[str, ...]
    fabric: str | None = None
    by: Literal["name", "link_layer", "provider"] = "name"


class NetworkNames(Record):
    """The content of ``networks.yaml``."""

    networks: tuple[NamedNetwork, ...]
    internal: tuple[str, ...]
    providers: dict[str, str]

    def named(self, name: str) -> NamedNetwork | None:
        return next((one for one in self.networks if any(fnmatchcase(name, each) for each in one.names)), None)


@cache
def network_names() -> NetworkNames:
    return read_file(NAMES, NetworkNames)


class Channels(Record):
    """Channels of the communicator that has most of them."""

    collective: int
    nvls: int | None
    point_to_point: int | None


class NodesNetwork(Record):
    """The network of nodes that are alike."""

    nodes: tuple[str, ...]
    fabric: str | None
    transport: str | None
    link_layer: str | None
    gpudirect: bool | None
    devices: tuple[str, ...] | None
    """All that NCCL found for this network."""
    devices_used: tuple[str, ...] | None
    """Devices of the channels of the ranks in the log."""
    idle_devices: tuple[str, ...] | None
    """Devices without a channel; None unless the log is of all ranks of the nodes."""


class Network(Record):
    """The network that NCCL used. What is None, here or of nodes, has a reason in ``reasons``, under its name."""

    used: tuple[str, ...]
    """Fabrics, as NCCL calls those that no data names; that of most nodes first."""
    devices: tuple[str, ...] | None
    """All that NCCL found on any node."""
    idle_devices: tuple[str, ...] | None
    """Devices that some node left idle; None where no node tells."""
    source: str
    """Where NCCL said it."""
    fabric: str | None
    """Such as InfiniBand, RoCE, EFA or TCP sockets."""
    transport: str | None
    """As NCCL calls it."""
    link_layer: str | None
    plugin: str | None
    """``internal`` if it is part of NCCL."""
    plugin_version: str | None
    nccl_version: str | None
    gpudirect: bool | None
    """Whether network cards read and write the memory of GPUs themselves."""
    nvls: bool | None
    """Whether switches of NVLink reduce."""
    mnnvl: bool | None
    """Whether NVLink connects several nodes."""
    collnet: bool | None
    """Whether switches of the network reduce, as with SHARP."""
    channels: Channels | None
    nodes: tuple[NodesNetwork, ...]
    """Nodes with the same network together, most of them first."""
    reasons: dict[str, str]


def read_network(texts: Iterable[bytes], source: str, ranks: int | None = None) -> Network | None:
    """``texts`` are whole lines of the logs that ``source`` names, ``ranks`` all of the run, if that is known.

    None if NCCL says nothing of a network.
    """
    heard = Heard()
    for text in texts:
        hear(text, heard)
    return network_of(heard, source, ranks)


def source_of(names: Sequence[str]) -> str:
    """Such as ``rank-0.log and 7 more``."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def beginning(stream: Readable) -> Iterator[bytes]:
    """Whole lines at the beginning of a log."""
    for position, text in whole_lines(stream):
        yield text
        if position + len(text) >= MOST_BYTES:
            return


def network_of(heard: Heard, source: str, ranks: int | None = None) -> Network | None:
    told = {name: node for name, node in heard.nodes.items() if node.selected or node.channels or node.nvlink}
    if not told:
        return None
    whole = heard.is_whole(ranks)
    nodes = _grouped({name: _node(node, heard, whole=whole) for name, node in told.items()})
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
        "plugin_version": heard.plugin_version if plugin not in (None, "internal") else None,
        "nccl_version": ", ".join(sorted(heard.versions)) or None,
        "nvls": None if heard.nvls is None else heard.nvls > 0,
        "mnnvl": heard.mnnvl,
        "collnet": heard.collnet or (False if heard.coll is not None else None),
        "channels": _channels(heard),
    }
    reasons = {name: _reason(name, nodes, plugin, heard) for name, value in values.items() if value is None}
    reasons |= {name: why for name, why in OF_DEVICES.items() if None in {getattr(node, name) for node in nodes}}
    return Network.model_validate({**values, "nodes": nodes, "reasons": reasons})


def _channels(heard: Heard) -> Channels | None:
    if heard.coll is None:
        return None
    return Channels(collective=heard.coll, nvls=heard.nvls, point_to_point=heard.p2p)


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
    """Devices of all nodes that tell; None if none does."""
    told: list[tuple[str, ...]] = [devices for node in nodes if (devices := getattr(node, name)) is not None]
    return tuple(dict.fromkeys(device for devices in told for device in devices)) if told else None


def _node(node: HeardNode, heard: Heard, *, whole: bool) -> NodesNetwork:
    used = sorted({name for name, _ in node.channels})
    names = used or ([] if node.nvlink or heard.mnnvl else list(node.selected))
    devices = tuple(dict.fromkeys(device for name in names for device in node.found(name))) or None
    busy = _busy(node)
    layers = {node.layers[device] for device in busy or devices or () if device in node.layers}
    link_layer = " and ".join(sorted(LINK_LAYERS[layer] for layer in layers)) or None
    direct = set(node.direct)
    return NodesNetwork(
        nodes=(),
        fabric=_joined(_fabric(name, link_layer, heard.provider) for name in names) if names else NVLINK,
        transport=" and ".join(names) or "MNNVL",
        link_layer=link_layer,
        gpudirect=direct.pop() if len(direct) == 1 else None,
        devices=devices,
        devices_used=busy,
        idle_devices=tuple(one for one in devices if one not in busy) if whole and devices and busy else None,
    )


def _busy(node: HeardNode) -> tuple[str, ...] | None:
    """The devices of channels; None without one, or if one has no name."""
    named = [node.names_of(name, index) for name, index in sorted(node.channels)]
    return tuple(dict.fromkeys(one for names in named for one in names)) if named and all(named) else None


def _joined(fabrics: Iterable[str | None]) -> str | None:
    every = list(dict.fromkeys(fabrics))
    return None if None in every else " and ".join(filter(None, every))


def _fabric(name: str, link_layer: str | None, provider: str | None) -> str | None:
    """A network that no data names is called what NCCL calls it."""
    known = network_names().named(name)
    if known is None:
        return name
    if known.by == "link_layer":
        return link_layer
    if known.by == "provider":
        return network_names().providers.get((provider or "").partition(";")[0])
    return known.fabric


def _plugin(transport: str) -> str:
    """Networks of plugins have the name of the plugin."""
    return "internal" if set(transport.split(" and ")) <= {*network_names().internal, "MNNVL"} else transport


def _reason(name: str, nodes: Iterable[NodesNetwork], plugin: str | None, heard: Heard) -> str:
    if name == "plugin_version" and plugin == "internal":
        return "it is part of NCCL and has its version"
    if name in NodesNetwork.model_fields and len({getattr(node, name) for node in nodes}) > 1:
        return DIFFERENT
    return {
        "gpudirect": _mixed(heard) or NO_CHANNELS,
        "fabric": "no line tells the link layer or the provider of this network",
        "link_layer": "no line tells it",
        "plugin": DIFFERENT,
    }.get(name, "the log has no line that tells it")


def _mixed(heard: Heard) -> str | None:
    """Such as on CPUs over which sending is faster by way of memory."""
    every = [direct for node in heard.nodes.values() for direct in node.direct.elements()]
    return f"{sum(every)} of {len(every)} channels use it" if any(every) else None

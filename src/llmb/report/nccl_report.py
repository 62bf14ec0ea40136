# SPDX-License-Identifier: Apache-2.0
"""The network that NCCL used, as a line and a table."""

from collections.abc import Iterator

from llmb.report.table import Table, result_table
from llmb.shown_text import counted, listed
from llmb.traces.nccl_network import Network, NodesNetwork

MOST_NAMED = 8
"""Nodes and devices of a row."""


def network_text(network: Network) -> str:
    """Such as ``InfiniBand, 8 devices, GPUDirect RDMA, NVLS, 16 channels; NCCL 2.28.9``."""
    devices = network.nodes[0].devices
    parts = [
        " and ".join(network.used),
        counted(len(devices), "device") if devices else "",
        {True: "GPUDirect RDMA", False: "no GPUDirect RDMA", None: ""}[network.gpudirect],
        "NVLS" if network.nvls else "",
        "CollNet" if network.collnet else "",
        f"{network.channels.collective} channels" if network.channels else "",
    ]
    version = f"; NCCL {network.nccl_version}" if network.nccl_version else ""
    return ", ".join(filter(None, parts)) + version


def network_table(network: Network) -> Table:
    """A row for each figure; what differs between nodes has a row for each kind of node."""
    table = result_table("Network", "what", "value", "note")
    plugin = " ".join(filter(None, (network.plugin, network.plugin_version)))
    for name, text, key in (
        ("NCCL", network.nccl_version, "nccl_version"),
        ("plugin", plugin, "plugin"),
        ("NVLS", _yes(network.nvls), "nvls"),
        ("NVLink between nodes", _yes(network.mnnvl), "mnnvl"),
        ("CollNet", _yes(network.collnet), "collnet"),
        ("channels", _channels(network), "channels"),
    ):
        table.add_row(name, text or "n/a", "" if text else network.reasons.get(key, ""))
    for nodes in network.nodes:
        where = _list(nodes.nodes)
        for name, text, key in _node_rows(nodes):
            table.add_row(name, text or "n/a", where if text else f"{where}: {network.reasons.get(key, '')}")
    if network.unread_lines:
        lines = counted(network.unread_lines, "line")
        table.caption = f"{lines} left out: the process that wrote it cannot be read."
    return table


def _node_rows(nodes: NodesNetwork) -> Iterator[tuple[str, str | None, str]]:
    yield "fabric", nodes.fabric, "fabric"
    yield "transport", nodes.transport, "transport"
    yield "GPUDirect RDMA", _yes(nodes.gpudirect), "gpudirect"
    for key in ("devices", "devices_used", "idle_devices"):
        devices: tuple[str, ...] | None = getattr(nodes, key)
        yield key.replace("_", " "), None if devices is None else _list(devices) or "none", key


def _channels(network: Network) -> str | None:
    if network.channels is None:
        return None
    kinds = (
        (network.channels.collective, "collective"),
        (network.channels.nvls, "NVLS"),
        (network.channels.point_to_point, "point-to-point"),
    )
    return ", ".join(f"{count} {name}" for count, name in kinds if count is not None)


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _list(names: tuple[str, ...]) -> str:
    return listed(names, MOST_NAMED)

# SPDX-License-Identifier: Apache-2.0
"""What NCCL says: the network that it used, and the ranks that hold up a run, as lines, tables and a JSON document."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmb.report.table import Column, Table, as_text, number_column, result_table, table_of, whole
from llmb.shown_text import counted, listed, printable
from llmb.traces.nccl_inspector import Inspected, late_text
from llmb.traces.nccl_network import Network, NodesNetwork
from llmb.traces.nccl_ras import RasStatus, ras_text
from llmb.traces.nccl_suspects import Suspect, said_of

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


MOST_ROWS = 40


class NcclStates(NamedTuple):
    """What RAS answered, by file, and what all files of Inspector tell."""

    ras: Sequence[tuple[str, RasStatus]] = ()
    inspected: Inspected | None = None


NO_STATES = NcclStates()


def states_document(states: NcclStates) -> dict[str, Any]:
    return {
        "ras": [{"source": source, **status.model_dump(mode="json")} for source, status in states.ras],
        "inspector": states.inspected and states.inspected.model_dump(mode="json"),
    }


def states_tables(states: NcclStates) -> Iterator[Table]:
    for source, status in states.ras:
        known = f"{whole(status.gpus) or 'unknown'} GPUs, communicators: {status.communicators:,}"
        title = f"RAS of NCCL {status.nccl_version}, {known} ({source})"
        yield _table(title, status.suspects, status.notes if status.suspects else [ras_text(status)])
    if found := states.inspected:
        title = f"Inspector of NCCL: {found.collectives:,} records of {found.processes:,} processes"
        same = [] if found.suspects else ["no rank has completed fewer operations than others"]
        yield _table(title, found.suspects, [*same, *([late_text(found.late)] if found.late else [])])


def _rank(row: Suspect) -> int | str | None:
    """The program's number, where it is known; how many ranks NCCL does not name."""
    own = row.rank if row.program_rank is None else row.program_rank
    return own if own is not None or row.operations is None else row.detail


def _table(title: str, suspects: Sequence[Suspect], notes: Sequence[str]) -> Table:
    columns: list[Column[Suspect]] = [
        number_column("rank", lambda row: _rank(row), as_text),
        Column("node", lambda row: row.node, as_text),
        number_column("process", lambda row: row.pid, as_text),
        number_column("GPU", lambda row: row.gpu, as_text),
        Column("communicator", lambda row: row.communicator, as_text),
        Column("what", said_of),
    ]
    table = table_of(title, suspects[:MOST_ROWS], columns, drop_empty=True)
    hidden = len(suspects) - MOST_ROWS
    more = [f"{hidden} more rows are left out, see --json"] if hidden > 0 else []
    table.caption = "\n".join(f"{printable(note)}." for note in (*notes, *more)) or None
    return table

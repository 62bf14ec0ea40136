# SPDX-License-Identifier: Apache-2.0
"""Snapshots of nodes' settings, and what has changed since, as tables and JSON, whose keys are a contract."""

from collections.abc import Callable, Iterator, Sequence

from llmb.catalogue.record import Record
from llmb.report.table import Table, result_table
from llmb.runs.drift import Drift
from llmb.shown_text import printable
from llmb.verdict.conditions import rule_of

HostList = Callable[[list[str]], str]


class SavedReport(Record):
    """What ``llmb doctor --save`` prints."""

    saved: str
    file: str
    nodes: tuple[str, ...]
    settings: int
    """How many most nodes have."""
    not_read: dict[str, str]
    missing: dict[str, str]


class DriftReport(Record):
    """What ``llmb doctor --against`` prints."""

    against: str
    saved_at: str | None
    nodes: tuple[str, ...]
    unknown_nodes: tuple[str, ...]
    """Nodes that it does not have, and that are compared with what was usual."""
    not_read: dict[str, str]
    missing: dict[str, str]
    drift: tuple[Drift, ...]


def saved_table(report: SavedReport, host_list: HostList) -> Table:
    table = result_table(f"Snapshot {report.saved}", "", "", "")
    table.add_row("nodes", str(len(report.nodes)), printable(host_list([*report.nodes])))
    table.add_row("settings", str(report.settings), printable(report.file))
    for name, reason in report.missing.items():
        table.add_row(name, "none", printable(reason))
    for node, reason in report.not_read.items():
        table.add_row(printable(node), "not read", printable(reason))
    return table


def drift_tables(report: DriftReport, host_list: HostList) -> Iterator[Table]:
    """The important changes first, and why they are; nodes with the same change are a row."""
    important = [one for one in report.drift if one.important]
    others = [one for one in report.drift if not one.important]
    since = printable(f"since {report.against}{f', {report.saved_at}' if report.saved_at else ''}")
    table = _changes(f"Important changes {since}", important, host_list)
    whys = dict.fromkeys(f"{one.key}: {rule_of(one.key).why}" for one in important)
    table.caption = "\n".join([*whys, *_notes(report, host_list)])
    yield table
    if others:
        yield _changes("Other changes", others, host_list)


def _changes(title: str, drift: Sequence[Drift], host_list: HostList) -> Table:
    table = result_table(title, *(("setting", "before", "now", "nodes") if drift else ("",)))
    groups: dict[tuple[str, str | None, str | None], list[str]] = {}
    for one in drift:
        groups.setdefault((one.key, one.before, one.after), []).append(one.node)
    for (key, before, after), nodes in groups.items():
        table.add_row(key, printable(before or "unset"), printable(after or "unset"), printable(host_list(nodes)))
    if not drift:
        table.add_row("none")
    return table


def _notes(report: DriftReport, host_list: HostList) -> Iterator[str]:
    if report.unknown_nodes:
        names = printable(host_list([*report.unknown_nodes]))
        yield f"{names}: not in {report.against}, so compared with what most of its nodes have"
    yield from (f"{printable(node)} was not read: {printable(reason)}" for node, reason in report.not_read.items())

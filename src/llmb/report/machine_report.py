# SPDX-License-Identifier: Apache-2.0
"""What happened on the nodes of a run meanwhile, as rows and as a table."""

from collections.abc import Iterator

from llmb.missing import Missing
from llmb.report.table import Table, result_table
from llmb.resources.machine import MachineReport, Unread, event_text, kind_text, machine_rules

STATES = {"faulty": "FAULTY NODE", "doubtful": "DOUBTFUL NODE"}
MOST_NAMED = 4
"""Nodes of a text."""


def machine_rows(machine: MachineReport) -> Iterator[tuple[str, str]]:
    """What is wrong."""
    for events in machine.kinds:
        yield STATES[events[0].state], kind_text(events)


def machine_note(machine: MachineReport | Missing) -> str:
    """Beside the state: whether anything rose, and what could not be read."""
    if isinstance(machine, Missing):
        return machine.reason
    unread = "; ".join(f"{one.what}{_where(one)}: {one.reason}" for one in machine.unread)
    found = "" if machine.events else "no counter of errors rose"
    return "; ".join(filter(None, (found, unread and f"not read: {unread}")))


def machine_table(machine: MachineReport) -> Table:
    """An event a row, then what could not be read."""
    table = result_table("Nodes meanwhile", "node", "what", "state", "seen", "to do")
    for event in machine.events:
        kind = machine_rules().kinds[event.kind].title
        table.add_row(event.node, kind, event.state, event_text(event), event.advice)
    if machine.events_left_out:
        table.add_row("", f"{machine.events_left_out} more", "", "", "")
    for one in machine.unread:
        table.add_row(_named(one.nodes), one.what, "unknown", f"not read: {one.reason}", "")
    if not table.rows:
        table.add_row("all", "counters of errors and the kernel's log", machine.state, "nothing rose", "")
    return table


def _where(one: Unread) -> str:
    return f" of {_named(one.nodes)}" if len(one.nodes) > 1 else ""


def _named(nodes: tuple[str, ...]) -> str:
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return ", ".join(nodes[:MOST_NAMED]) + more

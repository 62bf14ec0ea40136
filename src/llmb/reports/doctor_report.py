# SPDX-License-Identifier: Apache-2.0
"""Checks of nodes, and changes of their settings, as tables and JSON."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from llmb.base.record import Record
from llmb.base.shown_text import printable
from llmb.nodes.doctor.check_records import ANSWER, SEVERITY, Check, NodeReport, worst
from llmb.nodes.doctor.checked_nodes import NodesResult
from llmb.nodes.doctor.rules import AREAS, BETWEEN, Area, names_of, rule_of, rules
from llmb.reports.table import Column, Table, rows_table, table_of
from llmb.runs.conditions import Drift
from llmb.runs.conditions import rule_of as condition_rule

LONGEST_TITLE = 26
"""The maximum width of a check's title, which leaves space for the advice."""
MOST_NAMES = 5
"""More skipped checks of an area than this are listed as ``all`` or ``all others`` if they have the same reason."""
HostList = Callable[[Sequence[str]], str]
"""Formats names of nodes as a list in the scheduler's syntax."""
EVERYWHERE = "(all)"
Finding = tuple[str, str]


def doctor_document(reports: Sequence[NodeReport]) -> dict[str, Any]:
    """Return the JSON of ``llmb doctor``; its keys are a contract. A single node's report is also at the top level."""
    nodes = [report.model_dump(mode="json") for report in reports]
    single = nodes[0] if len(nodes) == 1 else {}
    return {**single, "status": worst(report.status for report in reports), "nodes": nodes}


def node_tables(report: NodeReport, *, folded: bool = False) -> Iterator[Table]:
    """Yield a table of failed checks and warnings with advice, then tables of passed and skipped checks, or with
    ``folded`` only their numbers by area in a caption."""
    problems = _problems(report)
    if folded:
        problems.caption = "\n".join(_folded(report))
    yield problems
    if folded:
        return
    if good := [check for check in report.checks if check.status == "pass"]:
        rows = [(rule_of(check.name).area, title_of(check.name), printable(check.value)) for check in good]
        yield _by_area("Passed", ("area", "check", "found"), rows)
    if report.not_checked:
        yield _by_area("Not checked", ("area", "checks", "why"), list(_not_checked(report)))


def _folded(report: NodeReport) -> Iterator[str]:
    passed = [check.name for check in report.checks if check.status == "pass"]
    for title, names in (("passed", passed), ("not checked", [item.name for item in report.not_checked])):
        areas = Counter(rule_of(name).area for name in names)
        if names:
            yield f"{title}: {', '.join(f'{area} {count}' for area, count in areas.items())}"
    yield "'llmb -v doctor' shows each, with what was found, or why it was not checked"


def title_of(name: str) -> str:
    """Return a check's title and, in parentheses, its place or the check that it compares, if any."""
    rule = rule_of(name)
    place = name.removeprefix(rule.name).removeprefix("_")
    place = rules()[place].title if place in rules() else place
    return f"{rule.title} ({place})" if place else rule.title


def summary(report: NodeReport) -> str:
    count = Counter(check.status for check in report.checks)
    done = f"{count['fail']} failed, {count['warn']} warned, {count['pass']} passed"
    return f"{done}, {len(report.not_checked)} not checked"


def _problems(report: NodeReport) -> Table:
    title = f"{printable(report.node)}: {report.status.upper()} ({summary(report)})"

    def advice_of(check: Check) -> str:
        return f"{printable(check.value)}\n-> {check.advice}" if check.advice else printable(check.value)

    columns: list[Column[Check]] = [
        Column("", lambda check: check.status.upper()),
        Column("check", lambda check: title_of(check.name), max_width=LONGEST_TITLE),
        Column("found, and what to do", advice_of, str),
    ]
    bad = _wrong(report.checks)
    return table_of(title, bad, columns if bad else columns[:1])


def _not_checked(report: NodeReport) -> Iterator[tuple[str, ...]]:
    """Yield the checks that were not made, by area and reason; a whole area of many is shown as ``all``."""
    checked = Counter(rule_of(check.name).area for check in report.checks)
    for area in (*AREAS, BETWEEN):
        reasons: dict[str, list[str]] = {}
        for item in report.not_checked:
            if rule_of(item.name).area == area:
                reasons.setdefault(item.reason, []).append(item.name)
        for reason, names in reasons.items():
            yield area, _names(area, names, checked[area]), printable(reason)


def _names(area: Area, names: Sequence[str], checked: int) -> str:
    if len(names) > MOST_NAMES and checked + len(names) >= len(names_of(area)):
        return "all others" if checked else "all"
    return ", ".join(map(title_of, names))


def _by_area(title: str, headers: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table in which the first column shows a repeated value only once."""
    before = ("", *(row[0] for row in rows))
    shown = (("", *row[1:]) if row[0] == last else row for row, last in zip(rows, before, strict=False))
    return rows_table(title, headers, shown)


def nodes_document(result: NodesResult, folder: str, host_list: HostList) -> dict[str, Any]:
    """Return the JSON of ``llmb doctor`` for nodes of a cluster, with lists of nodes; its keys are a contract."""
    return {
        **doctor_document(result.reports),
        "started_at": result.started_at,
        "folder": folder,
        "fit_nodes": host_list(result.fit),
        "unfit_nodes": host_list(result.unfit),
        "unchecked_nodes": host_list(result.unchecked),
    }


def nodes_tables(result: NodesResult, folder: str, host_list: HostList) -> Iterator[Table]:
    """Yield a table with one row per node, the worst first, or the details of a single node; then the node lists."""
    if len(result.reports) == 1:
        yield from node_tables(result.reports[0])
    else:
        reports = result.reports
        answered = [report for report in reports if report.answered]
        count = Counter(_key(check) for report in answered for check in report.checks if check.status != "pass")
        common = {key for key, number in count.items() if number == len(answered) and number > 1}
        given = set[str]()
        shared = {_key(check): check for report in reports for check in report.checks if _key(check) in common}
        rows = [(EVERYWHERE, "", _text(_wrong([*shared.values()]), given))] if shared else []
        for report in sorted(reports, key=lambda one: (-SEVERITY.index(one.status), one.answered)):
            own = [check for check in _wrong(report.checks) if _key(check) not in common]
            status = "-" if report.status != "fail" and not report.answered else report.status.upper()
            rows.append((printable(report.node), status, _text(own, given) if own else summary(report)))
        title = f"Check of {len(reports)} nodes, {result.started_at}"
        yield rows_table(title, ("node", "", "found, and what to do"), rows)
    lists = {"fit": result.fit, "unfit": result.unfit, "not checked": result.unchecked}
    where = printable(f"The reports, and what the jobs printed (.jobs), are in {folder}")
    yield node_lists_table(lists, host_list, where)


def node_lists_table(lists: Mapping[str, Sequence[str]], host_list: HostList, caption: str) -> Table:
    """Return a table with the number and names of nodes of each kind; empty kinds are omitted, except fit and unfit."""
    rows = (
        (name, str(len(nodes)), printable(host_list(nodes)) or "none")
        for name, nodes in lists.items()
        if nodes or name in ("fit", "unfit")
    )
    return rows_table("Nodes", ("", "number", "list"), rows, right=("number",), caption=caption)


def _key(check: Check) -> Finding:
    return check.name, str(check.value)


def _wrong(checks: Collection[Check]) -> list[Check]:
    bad = [check for check in checks if check.status != "pass"]
    return sorted(bad, key=lambda check: -SEVERITY.index(check.status))


def _text(checks: Collection[Check], given: set[str]) -> str:
    """Format the values of checks, and the advice that is not yet in ``given``; add this advice to ``given``."""
    lines = []
    for check in checks:
        mark = "" if check.name == ANSWER else f"{title_of(check.name)}: "
        lines.append(f"{mark}{printable(check.value)}")
        if check.advice and check.advice not in given:
            lines.append(f"-> {check.advice}")
            given.add(check.advice)
    return "\n".join(lines)


class DriftReport(Record):
    """The result of ``llmb doctor --against``."""

    against: str
    saved_at: str | None
    """The time at which the run began."""
    nodes: tuple[str, ...]
    unknown_nodes: tuple[str, ...]
    """Nodes without recorded settings, which are compared with the most common ones."""
    not_read: dict[str, str]
    missing: dict[str, str]
    drift: tuple[Drift, ...]


def drift_tables(report: DriftReport, host_list: HostList) -> Iterator[Table]:
    """Yield tables of important changes, with reasons, and of others. Nodes with the same change share a row."""
    important = [one for one in report.drift if one.important]
    others = [one for one in report.drift if not one.important]
    since = printable(f"since {report.against}{f', {report.saved_at}' if report.saved_at else ''}")
    notes = [*dict.fromkeys(f"{one.key}: {condition_rule(one.key).why}" for one in important)]
    if report.unknown_nodes:
        names = printable(host_list([*report.unknown_nodes]))
        notes.append(f"{names}: not in {report.against}, so compared with the most common values")
    notes += (f"{printable(node)} was not read: {printable(reason)}" for node, reason in report.not_read.items())
    yield _changes(f"Important changes {since}", important, host_list, notes)
    if others:
        yield _changes("Other changes", others, host_list)


def _changes(title: str, drift: Sequence[Drift], host_list: HostList, notes: Sequence[str] = ()) -> Table:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in drift:
        groups.setdefault((one.key, one.before or "unset", one.after or "unset"), []).append(one.node)
    rows = [tuple(map(printable, (*key, host_list(nodes)))) for key, nodes in groups.items()] or [("none",)]
    return rows_table(title, ("setting", "before", "now", "nodes") if drift else ("",), rows, caption=notes)

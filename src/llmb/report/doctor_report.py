# SPDX-License-Identifier: Apache-2.0
"""Checks of nodes as tables and JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from llmb.health.records import SEVERITY, Check, NodeReport, worst
from llmb.health.rules import AREAS, BETWEEN, Area, names_of, rule_of, rules
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

LONGEST_TITLE = 26
"""Of a check beside its advice, which needs the space."""
MOST_NAMES = 5
"""Checks of one area that are named, if they are all that is left of it."""


def doctor_document(reports: Sequence[NodeReport]) -> dict[str, Any]:
    """The JSON of ``llmb doctor``; the report of a single node is also at the top. Its keys are a contract."""
    nodes = [report.model_dump(mode="json") for report in reports]
    single = nodes[0] if len(nodes) == 1 else {}
    return {**single, "status": worst(report.status for report in reports), "nodes": nodes}


def node_tables(report: NodeReport) -> Iterator[Table]:
    """What is wrong first, each with what to do; then what is right, and what could not be checked."""
    yield _problems(report)
    good = [check for check in report.checks if check.status == "pass"]
    if good:
        table = result_table("Passed", "area", "check", "found")
        for check in good:
            table.add_row(rule_of(check.name).area, title_of(check.name), printable(check.value))
        yield _with_areas_once(table)
    if report.not_checked:
        yield _with_areas_once(_not_checked(report))


def title_of(name: str) -> str:
    """What a check looks at, with the place, or the check that it compares, if there are several."""
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
    bad = sorted((check for check in report.checks if check.status != "pass"), key=_severity)
    table = result_table(title, *(("", "check", "found, and what to do") if bad else ("",)))
    if bad:
        table.columns[1].max_width = LONGEST_TITLE
    for check in bad:
        advice = f"\n-> {check.advice}" if check.advice else ""
        table.add_row(check.status.upper(), title_of(check.name), f"{printable(check.value)}{advice}")
    return table


def _severity(check: Check) -> int:
    return -SEVERITY.index(check.status)


def _not_checked(report: NodeReport) -> Table:
    """Checks with the same reason together; all of an area in one word."""
    table = result_table("Not checked", "area", "checks", "why")
    checked = Counter(rule_of(check.name).area for check in report.checks)
    for area in (*AREAS, BETWEEN):
        reasons: dict[str, list[str]] = {}
        for item in report.not_checked:
            if rule_of(item.name).area == area:
                reasons.setdefault(item.reason, []).append(item.name)
        for reason, names in reasons.items():
            table.add_row(area, _names(area, names, checked[area]), printable(reason))
    return table


def _names(area: Area, names: Sequence[str], checked: int) -> str:
    if len(names) > MOST_NAMES and checked + len(names) >= len(names_of(area)):
        return "all others" if checked else "all"
    return ", ".join(map(title_of, names))


def _with_areas_once(table: Table) -> Table:
    """The first column only where it changes."""
    rows = table.rows
    before = ("", *(row[0] for row in rows))
    table.rows = [("", *row[1:]) if row[0] == last else row for row, last in zip(rows, before, strict=False)]
    return table

# SPDX-License-Identifier: Apache-2.0
"""A check of several nodes as tables and JSON."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from llmb.health.kept_checks import NodesResult
from llmb.health.records import ANSWER, SEVERITY, Check, NodeReport
from llmb.report.doctor_report import doctor_document, node_tables, summary, title_of
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

HostList = Callable[[Sequence[str]], str]
"""Names of nodes as a list in the scheduler's syntax."""
EVERYWHERE = "(all)"
Finding = tuple[str, str]


def nodes_document(result: NodesResult, folder: str, host_list: HostList) -> dict[str, Any]:
    """The JSON of ``llmb doctor`` over nodes: that of one node, and lists. Its keys are a contract."""
    return {
        **doctor_document(result.reports),
        "started_at": result.started_at,
        "folder": folder,
        "fit_nodes": host_list(result.fit),
        "unfit_nodes": host_list(result.unfit),
        "unchecked_nodes": host_list(result.unchecked),
    }


def nodes_tables(result: NodesResult, folder: str, host_list: HostList) -> Iterator[Table]:
    """A row per node, the worst first; then the lists. Of a single node everything."""
    if len(result.reports) == 1:
        yield from node_tables(result.reports[0])
    else:
        yield _rows(result)
    yield _lists(result, folder, host_list)


def _rows(result: NodesResult) -> Table:
    reports = result.reports
    table = result_table(f"Check of {len(reports)} nodes, {result.started_at}", "node", "", "found, and what to do")
    common = _common(reports)
    told = set[str]()
    shared = {_key(check): check for report in reports for check in report.checks if _key(check) in common}
    if shared:
        table.add_row(EVERYWHERE, "", _text(_problems([*shared.values()]), told))
    for report in sorted(reports, key=_severity):
        own = [check for check in _problems(report.checks) if _key(check) not in common]
        table.add_row(printable(report.node), _status(report), _text(own, told) if own else summary(report))
    return table


def _lists(result: NodesResult, folder: str, host_list: HostList) -> Table:
    table = result_table("Nodes", "", "number", "list", right=("number",))
    table.caption = printable(f"The reports, and what the jobs printed (.jobs), are in {folder}")
    lists = {"fit": result.fit, "unfit": result.unfit, "not checked": result.unchecked}
    for name, nodes in lists.items():
        if nodes or name != "not checked":
            table.add_row(name, str(len(nodes)), printable(host_list(nodes)) or "none")
    return table


def _common(reports: Sequence[NodeReport]) -> Collection[Finding]:
    """What is wrong with every node that was looked at, which is reported once."""
    answered = [report for report in reports if report.answered]
    count = Counter(_key(check) for report in answered for check in report.checks if check.status != "pass")
    return {key for key, number in count.items() if number == len(answered) and number > 1}


def _key(check: Check) -> Finding:
    return check.name, str(check.value)


def _problems(checks: Collection[Check]) -> list[Check]:
    bad = [check for check in checks if check.status != "pass"]
    return sorted(bad, key=lambda check: -SEVERITY.index(check.status))


def _severity(report: NodeReport) -> tuple[int, bool]:
    return -SEVERITY.index(report.status), report.answered


def _status(report: NodeReport) -> str:
    return "-" if report.status != "fail" and not report.answered else report.status.upper()


def _text(checks: Collection[Check], told: set[str]) -> str:
    """Each advice is given once in a table, and then is among ``told``."""
    lines = []
    for check in checks:
        mark = "" if check.name == ANSWER else f"{title_of(check.name)}: "
        lines.append(f"{mark}{printable(check.value)}")
        if check.advice and check.advice not in told:
            lines.append(f"-> {check.advice}")
            told.add(check.advice)
    return "\n".join(lines)

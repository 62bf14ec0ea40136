# SPDX-License-Identifier: Apache-2.0
"""Where a bisection stands, as a table and for people."""

import shlex

from llmb.analysis.bisect_runs import BisectReport
from llmb.analysis.bisect_state import DEFAULT_NAME
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

COLUMNS = ("candidate", "runs", "step time (s)", "change (%)", "probability (%)", "standing")


def bisect_table(report: BisectReport) -> Table:
    table = result_table(f"Bisection {report.name}, {report.total_runs} runs so far", *COLUMNS, right=COLUMNS[1:-1])
    for one in report.candidates:
        table.add_row(
            printable(one.candidate),
            str(one.runs),
            number(one.step_time_s) if one.step_time_s else "",
            "" if one.delta_pct is None else f"{one.delta_pct:+.1f}",
            "" if one.probability is None else f"{100 * one.probability:.1f}",
            one.standing,
        )
    table.caption = printable_lines(bisect_text(report))
    return table


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def bisect_text(report: BisectReport) -> str:
    """What was found, or what to do next."""
    match report.status:
        case "found":
            return _found_text(report)
        case "stuck":
            return f"{report.candidate}: {report.reason}" if report.candidate else f"The search ends: {report.reason}."
    runs = "once" if report.runs == 1 else f"{report.runs} times"
    lines = [f"Next: run '{report.candidate}' {runs}, with --label {report.label}."]
    if report.command:
        lines += [f"  {shlex.join(report.command)}"]
    named = "" if report.name == DEFAULT_NAME else f" --name {report.name}"
    return "\n".join((*lines, f"Then: llmb bisect next{named}"))


def _found_text(report: BisectReport) -> str:
    who = " or ".join(f"'{candidate}'" for candidate in report.found)
    low, high = report.ci95_pct or (None, None)
    interval = "" if low is None or high is None else f" ({low:+.1f} to {high:+.1f} %)"
    skipped = "; the others of these could not run" if len(report.found) > 1 else ""
    return (
        f"The change came with {who}, with a probability of {100 * (report.probability or 0):.1f} %: step time"
        f" {report.delta_pct or 0:+.1f} %{interval}, after {report.total_runs} runs{skipped}."
    )

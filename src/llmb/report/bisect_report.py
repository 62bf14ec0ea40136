# SPDX-License-Identifier: Apache-2.0
"""Where a bisection stands, as a table and for people."""

import shlex

from llmb.analysis.bisect_runs import BisectReport, CandidateReport
from llmb.analysis.bisect_state import DEFAULT_NAME
from llmb.report.numbers import known
from llmb.report.table import Column, Table, number_column, table_of


def bisect_table(report: BisectReport) -> Table:
    columns: list[Column[CandidateReport]] = [
        Column("candidate", lambda one: one.candidate),
        number_column("runs", lambda one: one.runs, str),
        number_column("step time (s)", lambda one: one.step_time_s or None, known),
        number_column("change (%)", lambda one: one.delta_pct, lambda pct: "" if pct is None else f"{pct:+.1f}"),
        number_column("probability (%)", lambda one: one.probability, lambda p: "" if p is None else f"{100 * p:.1f}"),
        Column("standing", lambda one: one.standing),
    ]
    table = table_of(f"Bisection {report.name}, {report.total_runs} runs so far", report.candidates, columns)
    table.caption = bisect_text(report)
    return table


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

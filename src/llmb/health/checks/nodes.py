# SPDX-License-Identifier: Apache-2.0
"""Checks of nodes beside each other: values that are unlike those of most, and clocks. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median

from llmb.health.records import Check, NodeReport, worst
from llmb.health.rules import SAME_PCT, rule, rules
from llmb.health.words import counted, listed

Value = str | float


def compared(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """The reports, with the checks that only several nodes make possible."""
    checks = _different(reports)
    clocks = {report.node: report.clock_ahead_s for report in reports if report.clock_ahead_s is not None}
    if len(clocks) > 1:
        usual = median(clocks.values())
        for report in reports:
            if report.node in clocks:
                checks[report.node].append(_clock(report, clocks[report.node] - usual, len(clocks)))
    return [_with_checks(report, checks[report.node]) for report in reports]


def _with_checks(report: NodeReport, checks: Sequence[Check]) -> NodeReport:
    every = (*report.checks, *checks)
    return report.model_copy(update={"checks": every, "status": worst(check.status for check in every)})


def _different(reports: Sequence[NodeReport]) -> dict[str, list[Check]]:
    """By node. A value that a check has found bad is not compared: that check reports it."""
    found: dict[str, list[Check]] = {report.node: [] for report in reports}
    for name in (item.name for item in rules().values() if item.same):
        values = {report.node: value for report in reports if (value := _value(report, name)) is not None}
        groups = grouped(values)
        if len(groups) < 2:
            continue
        for shown, nodes in groups.items():
            if 2 * len(nodes) > len(values):
                continue
            others = sorted((item for item in groups.items() if item[0] != shown), key=lambda item: -len(item[1]))
            text = listed(f"{other} on {counted(len(names), 'other node')}" for other, names in others)
            for node in nodes:
                found[node].append(rule("nodes_same").found("warn", f"{shown}; {text}", of=name))
    return found


def _value(report: NodeReport, name: str) -> Value | None:
    return next((check.value for check in report.checks if check.name == name and check.status == "pass"), None)


def grouped(values: Mapping[str, Value]) -> dict[str, list[str]]:
    """Nodes by their value in words; numbers that are nearly equal go with the median of all."""
    numbers = [value for value in values.values() if isinstance(value, (int, float))]
    usual = median(numbers) if numbers else 0.0
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        near = isinstance(value, (int, float)) and abs(value - usual) <= abs(usual) * SAME_PCT / 100
        groups.setdefault(f"{usual:g}" if near else str(value), []).append(node)
    return groups


def _clock(report: NodeReport, ahead_s: float, nodes: int) -> Check:
    unsure_s = report.clock_uncertainty_s or 0.0
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"{abs(ahead_s):.3f} s {side} the median of {nodes} nodes (± {unsure_s:.3f} s)"
    return rule("nodes_clock").measured(max(abs(ahead_s) - unsure_s, 0.0), text)

# SPDX-License-Identifier: Apache-2.0
"""Nodes beside each other: which ones are unlike most, and whose clock is off. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from llmb.health.checks.words import counted, listed
from llmb.health.records import Check, NodeReport, worst
from llmb.health.rules import SAME_PCT, rule, rules

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
    return [with_checks(report, checks[report.node]) for report in reports]


def with_checks(report: NodeReport, checks: Sequence[Check]) -> NodeReport:
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
        most = max(groups.values(), key=len)
        usual = most if 2 * len(most) > len(values) else None
        for shown, nodes in groups.items():
            if nodes is usual:
                continue
            others = {text: len(names) for text, names in groups.items() if names is not nodes}
            text = listed(f"{other} on {counted(count, 'other node')}" for other, count in _most_first(others))
            for node in nodes:
                found[node].append(rule("nodes_same").found("warn", f"{shown}; {text}", of=name))
    return found


def _most_first(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    yield from sorted(counts.items(), key=lambda item: -item[1])


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

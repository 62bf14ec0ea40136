# SPDX-License-Identifier: Apache-2.0
"""Builds the rows of an acceptance from the documents that its commands print, or that its jobs save."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from llmb.base.shown_text import counted, listed
from llmb.nodes.acceptance.parts import AcceptancePart, PartResult, Status
from llmb.runs.result import WORST

MOST_NAMES = 4
"""The maximum number of failed checks or devices that one row of the table names."""
Document = Mapping[str, Any]


def _command(result: PartResult) -> str:
    return " ".join(("llmb", *result.command))


def _reports(result: PartResult) -> Sequence[Document]:
    document = result.document or {}
    return document.get("nodes") or ([document] if "checks" in document else [])


def unfit_of_checks(result: PartResult) -> list[str]:
    """Return the nodes that failed a check or did not answer."""
    return [one["node"] for one in _reports(result) if one["status"] == "fail" or _no_answer(one)]


def _no_answer(report: Document) -> bool:
    return any(check["name"] == "nodes_answer" and check["status"] != "pass" for check in report["checks"])


def checks_row(result: PartResult) -> AcceptancePart:
    """Return the row for the checks of one or more nodes."""
    reports = _reports(result)
    checks = [(one["node"], check["name"], check["status"]) for one in reports for check in one["checks"]]
    failed = [f"{node} {name}" for node, name, status in checks if status == "fail"]
    names = [f"{node} {name}" if len(reports) > 1 else name for node, name, status in checks if status == "warn"]
    warned = listed(names, 2)
    status: Status = "fail" if failed or not checks else "warn" if warned else "pass"
    passed = f"{counted(sum(status == 'pass' for _, _, status in checks), 'check')} passed"
    passed += f"; warned: {warned}" if warned else ""
    value = f"{listed(failed, MOST_NAMES)} failed" if failed else passed if checks else result.error or "no check ran"
    if len(reports) > 1:
        value += f", of {len(reports)} nodes"
    return AcceptancePart(name="checks", status=status, value=value, command=_command(result))


def devices_row(result: PartResult, document: Document | None) -> AcceptancePart:
    """Return the row for devices: their problems, or else the median rate of a matrix product."""
    found = document or {}
    slow = [
        f"{one['node']} rank {one['local_rank']} is {one['below_median_pct']:.0f} % below the median"
        for one in found.get("devices", [])
        if one["slow"]
    ]
    slow += [f"{one['node']} {one['part']}: {one['reason']}" for one in found.get("failed", [])]
    slow += [f"{node} reported nothing" for node in found.get("missing_nodes", [])]
    count, median = len(found.get("devices", [])), found.get("median_tflops")
    value = "; ".join(slow[:MOST_NAMES]) or (
        f"{median:.4g} TFLOPS, median of {count}" if median else result.error or "nothing was measured"
    )
    status: Status = "fail" if slow or not count else "pass"
    return AcceptancePart(name="devices", status=status, value=value, command=_command(result))


def pairs_row(result: PartResult, document: Document | None) -> AcceptancePart:
    """Return the row for nodes measured in pairs: the evidence against unfit nodes, or else the number of fit ones."""
    nodes = (document or {}).get("nodes", [])
    unfit = [f"{one['node']}: {'; '.join(one['evidence'])}" for one in nodes if one["fit"] is False]
    value = "; ".join(unfit) or f"{sum(one['fit'] is True for one in nodes)} of {len(nodes)} nodes are fit"
    fit = sum(one["fit"] is True for one in nodes)
    status: Status = "fail" if unfit or not fit else "inconclusive" if fit < len(nodes) else "pass"
    return AcceptancePart(name="pairs", status=status, value=value, command=_command(result))


def measured_row(name: str, result: PartResult, before: PartResult | None) -> AcceptancePart:
    """Return the row for a measurement: the bandwidth at the largest size, compared with the peak or an earlier one."""
    largest, earlier = _largest(result), _largest(before) if before else None
    if largest is None:
        status: Status = "fail" if result.exit_code else "measured"
        return AcceptancePart(name=name, status=status, value=result.error or "", command=_command(result))
    peak = largest.get("peak_pct")
    reference = f"{peak:.0f} % of the peak" if peak else f"{_speed(earlier):.4g} GB/s before" if earlier else None
    wrong = largest.get("wrong") or result.exit_code
    value = f"{_speed(largest):.4g} GB/s" + (f"; {result.error}" if wrong and result.error else "")
    status = "fail" if wrong else "measured"
    return AcceptancePart(name=name, status=status, value=value, reference=reference, command=_command(result))


def _largest(result: PartResult | None) -> Document | None:
    rows = (result.document or {}).get("measurements", []) if result else []
    return max(rows, key=lambda row: row["size_bytes"] or 0, default=None)


def _speed(row: Document) -> float:
    return float(row["bus_bandwidth_gb_per_s"] or row["bandwidth_gb_per_s"])


def runs_row(name: str, result: PartResult, repeats: int) -> AcceptancePart:
    """Return the row for runs of a recipe, with the mean step time of each dtype, if the command reports it."""
    document = result.document or {}
    command = _command(result)
    if result.exit_code:
        status: Status = "invalid" if result.exit_code == 6 else "fail"
        value = result.error or "a run failed"
        return AcceptancePart(name=name, status=status, value=value, command=command, training=True)
    rows = document.get("rows") or []
    steps = [f"{row['step_time_s']:.4g}" for row in rows if row["step_time_s"]]
    value = f"{counted(repeats, 'run')}{' each' if len(rows) > 1 else ''}: {', '.join(steps)} s a step" if steps else ""
    value = value or counted(repeats, "run")
    return AcceptancePart(name=name, status="measured", value=value, command=command, training=True)


def verdict_rows(name: str, result: PartResult, against: str | None = None) -> list[AcceptancePart]:
    """Return a row per recipe with its worst verdict, or a single row if there is no verdict. Regressions against
    predictions that no measured step confirms become inconclusive."""
    by_recipe: dict[str, list[Document]] = {}
    for one in (result.document or {}).get("judged", []):
        by_recipe.setdefault(one["recipe"], []).append(one)
    if not by_recipe:
        value = result.error or "no verdict"
        return [AcceptancePart(name=name, status="inconclusive", value=value, command=_command(result), training=True)]
    rows = []
    short = {recipe: " ".join(recipe.split()[1:3]) for recipe in by_recipe}
    for recipe, verdicts in by_recipe.items():
        one = min(verdicts, key=lambda each: WORST.index(each["verdict"]))
        reference, delta = one["reference"], one["delta_pct"]
        compared = f"{abs(delta):.1f} % {'slower' if delta > 0 else 'faster'}" if delta is not None else one["reason"]
        if delta is not None and one["verdict"] == "inconclusive":
            compared += f", {one['reason']}"
        text = f"{reference['step_time_s']:.4g} s, {against or reference['kind']}" if reference else None
        status = one["verdict"]
        if status == "regressed" and one["soft"] and reference["kind"] == "prediction":
            status, compared = "inconclusive", f"{compared}, but no measured step confirms this prediction"
        assert status in get_args(Status)
        step = f"{one['step_time_s']:.4g} s, " if one["step_time_s"] else ""
        own = name
        if len(by_recipe) > 1:
            own += f" {short[recipe] if [*short.values()].count(short[recipe]) == 1 else recipe}"
        value, command = f"{step}{compared}", _command(result)
        part = AcceptancePart(name=own, status=status, value=value, reference=text, command=command, training=True)
        rows.append(part)
    return rows


def more_runs_needed(result: PartResult) -> int:
    """Return the number of additional runs that would make verdicts conclusive; 0 if none are needed or would help."""
    return max((one["more_runs"] or 0 for one in (result.document or {}).get("judged", [])), default=0)

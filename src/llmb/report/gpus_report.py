# SPDX-License-Identifier: Apache-2.0
"""The same product on every GPU, as tables and as a JSON document."""

from collections.abc import Iterator
from typing import Any

from llmb.health.gpus import Part, Parts, median_tflops
from llmb.microbenchmarks.outliers import OutlierRule
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

MOST_ROWS = 64
"""Above that only slow ones are listed."""


def gpus_document(parts: Parts, rule: OutlierRule) -> dict[str, Any]:
    """``exclude`` is the list of nodes for ``llmb submit --exclude``; None if no node is unfit."""
    return {
        "median_tflops": median_tflops(parts),
        "rule": rule.model_dump(),
        "devices": [
            {
                "node": part.row.node,
                "local_rank": part.row.rank,
                "uuid": part.row.device_uuid,
                "device": part.row.device,
                "tflops": part.row.tflops,
                "below_median_pct": part.below_pct,
                "slow": part.slow,
            }
            for part in parts.measured
        ],
        "failed": [{"node": node, "part": row.case, "reason": row.reason} for node, row in parts.failed],
        "missing_nodes": list(parts.missing_nodes),
        "exclude": ",".join(parts.unfit_nodes) or None,
    }


def gpus_tables(parts: Parts, rule: OutlierRule) -> Iterator[Table]:
    """The devices, or of many only the slow ones; then those that failed, and nodes that reported nothing."""
    if parts.measured:
        yield _devices(parts, rule)
    if parts.failed or parts.missing_nodes:
        table = result_table("Not measured", "node", "part", "reason")
        for node, row in parts.failed:
            table.add_row(printable(node), row.case, printable(row.reason))
        for node in parts.missing_nodes:
            table.add_row(printable(node), "", "the node reported nothing")
        yield table


def _devices(parts: Parts, rule: OutlierRule) -> Table:
    slow, many = parts.slow, len(parts.measured) > MOST_ROWS
    shown = slow if many else sorted(parts.measured, key=lambda part: (part.row.node, part.row.rank or 0))
    row = parts.measured[0].row
    kinds = dict.fromkeys(part.row.device for part in parts.measured)
    what = f"{row.shape} in {row.dtype} on {len(parts.measured)} devices at once"
    title = printable(f"{what}, {', '.join(kinds)}: {len(slow)} slow")
    has_uuid = any(part.row.device_uuid for part in shown)
    headers = ("node", "local rank", "TFLOPS", "below median %", "", *(["uuid"] if has_uuid else []))
    table = result_table(title, *headers, right=("local rank", "TFLOPS", "below median %"))
    for part in shown:
        table.add_row(*_cells(part), *([part.row.device_uuid or ""] if has_uuid else []))
    table.caption = _rule_text(parts, rule)
    return table


def _cells(part: Part) -> tuple[str, ...]:
    row = part.row
    return printable(row.node), str(row.rank), number(row.tflops), f"{part.below_pct:.1f}", "SLOW" if part.slow else ""


def _rule_text(parts: Parts, rule: OutlierRule) -> str:
    if len(parts.measured) < rule.least_devices:
        return f"No device is called slow with fewer than {rule.least_devices}: nothing tells which one of two is."
    return (
        f"Median {number(median_tflops(parts))} TFLOPS. Slow: more than {rule.below_pct:g} % and more than "
        f"{rule.sigmas:g} robust standard deviations below the median of devices of the same name."
    )


def advice(parts: Parts) -> str | None:
    """What to do about unfit nodes; None if there are none."""
    nodes = ",".join(parts.unfit_nodes)
    if not nodes:
        return None
    return f"'llmb doctor' on these nodes looks for the cause; until it is mended: llmb submit --exclude {nodes}"

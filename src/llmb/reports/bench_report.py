# SPDX-License-Identifier: Apache-2.0
"""Measurements of microbenchmarks, GPUs and pairs of nodes, as tables and JSON documents."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from llmb.base.shown_text import counted, printable
from llmb.nodes.bench.measurements import FigureChange, Measurement, MeasurementFile, NotMeasured, changes
from llmb.nodes.bench.pairs import NodeVerdict, PairFigures, PairwiseResult
from llmb.nodes.bench.slow_gpus import OutlierRule, Part, Parts, median_tflops
from llmb.reports.doctor_report import HostList, node_lists_table
from llmb.reports.formats import cell, duration, formatted, number, whole
from llmb.reports.table import Column, Table, fields_of, numbers, rows_table, table_of, texts

GB = 1e9
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
NOTES = {
    "gemm": "dgrad: gradient of the input; wgrad: gradient of the weight.",
    "attention": "FLOPs of the causal half; a backward pass counts 2.5 forward passes.",
    "memory": "GB/s: bytes read and bytes written.",
    "launch": "Per operation. host: until it is queued, or done on a CPU; device: in a full queue; graph: in a CUDA "
    "graph; round_trip: alone, until it is done.",
}
"""Explanations of values, by benchmark."""
SCATTERED = 2.0
"""If the median is this many times the fastest repetition, other work is the likely cause."""
MOST_DEVICES = 64
"""Number of devices above which only slow ones are listed."""


def measurement_document(measured: MeasurementFile) -> dict[str, Any]:
    """Return the measurements as a JSON document, with ``peak_pct`` in each row."""
    document = measured.model_dump(mode="json")
    for row, values in zip(measured.measurements, document["measurements"], strict=True):
        values["peak_pct"] = row.peak_pct
    return document


def measurement_tables(measured: MeasurementFile, title: str) -> Iterator[Table]:
    """Yield tables of bursts, of sustained rates, and of cases that could not be measured."""
    rows = measured.measurements
    parts = [[row for row in rows if row.sustained == sustained] for sustained in (False, True)]
    headings = (title, f"Sustained: {title[:1].lower()}{title[1:]}")
    tables = [measurement_table(part, heading) for part, heading in zip(parts, headings, strict=True) if part]
    if tables:
        tables[-1].caption = _notes(rows)
    yield from tables
    if measured.not_measured:
        yield not_measured_table(measured.not_measured)


def not_measured_table(rows: Sequence[NotMeasured]) -> Table:
    shape = Column[NotMeasured]("shape", lambda row: row.shape or whole(row.size_bytes))
    return table_of("Not measured", rows, [*texts("case"), shape, *texts("dtype", "reason")])


def measurement_table(rows: Sequence[Measurement], title: str) -> Table:
    """Return a table with one row per measurement, without columns that are empty in all rows."""
    unit, seconds = _unit(rows)
    columns: list[Column[Measurement]] = [
        *texts("device", common=True),
        *numbers(
            "threads: cpu_threads", form=lambda count: "" if count is None else counted(count, "thread"), common=True
        ),
        *numbers("rank", form=whole),
        *texts("case"),
        *numbers("bytes: size_bytes", form=whole),
        *texts("shape"),
        *texts("dtype", "kernel: backend", common=True),
        Column(unit, lambda row: row.time_s / seconds, number),
        *numbers("TFLOPS: tflops", "GB/s: bandwidth_gb_per_s", "bus GB/s: bus_bandwidth_gb_per_s", form=cell),
        *numbers("peak %: peak_pct", form=formatted("{:.1f}")),
    ]
    return table_of(printable(title), rows, columns, drop_empty=True)


def _notes(rows: Sequence[Measurement]) -> str | None:
    notes = list(dict.fromkeys(NOTES[row.benchmark] for row in rows if row.benchmark in NOTES))
    notes += dict.fromkeys(f"No share of the peak: {row.peak_reason}." for row in rows if row.peak_reason)
    scatter = max((row.time_s / row.fastest_s for row in rows if row.fastest_s), default=1.0)
    if scatter >= SCATTERED:
        notes.append(
            f"Times are medians; the fastest repetition was up to {scatter:.3g} times faster: other work seems to "
            "disturb this machine."
        )
    return "\n".join(map(printable, notes)) or None


def _unit(rows: Sequence[Measurement]) -> tuple[str, float]:
    """Return the largest unit in which the rows' median time is at least 1, else the smallest, and its seconds."""
    middle = median(row.time_s for row in rows)
    return next(((name, size) for name, size in UNITS if middle >= size), UNITS[-1])


def history_document(files: Sequence[MeasurementFile], benchmark: str | None) -> dict[str, Any]:
    """Return the JSON of each case's newest measurement; ``change_pct`` is positive if the previous one was slower."""
    names = ("measured_at", "latest", "previous_at", "previous")
    return {"changes": [fields_of(one, *names, "change_pct: speed_pct") for one in changes(files, benchmark)]}


def history_tables(files: Sequence[MeasurementFile], benchmark: str | None, folder: Path) -> Iterator[Table]:
    """Yield a table for each node and benchmark, or an empty one if there are no measurements."""
    found = changes(files, benchmark)
    if not found:
        what = f"No measurement{f' of {benchmark}' if benchmark else ''} in {folder}"
        yield Table(printable(what), [Column("")], caption="'llmb bench gemm' measures matrix products.")
    for (node, name), group in groupby(found, key=lambda change: (change.latest.node, change.latest.benchmark)):
        yield _history_table(list(group), f"{name} on node {node}")


def _history_table(found: Sequence[FigureChange], title: str) -> Table:
    rows = [change.latest for change in found]
    unit, seconds = _unit(rows)
    rated = any(row.tflops or row.bandwidth_gb_per_s or row.bus_bandwidth_gb_per_s for row in rows)
    columns: list[Column[FigureChange]] = [
        *texts("device: latest.device", common=True),
        *numbers("rank: latest.rank", form=whole),
        Column("case", lambda change: f"{change.latest.case}{', sustained' if change.latest.sustained else ''}"),
        *numbers("bytes: latest.size_bytes", form=whole),
        *texts("shape: latest.shape"),
        *texts("dtype: latest.dtype", common=True),
        Column("measured", lambda change: f"{change.measured_at[:16].replace('T', ' ')} UTC", common=True),
        *numbers("TFLOPS: latest.tflops", "GB/s: latest.bandwidth_gb_per_s", form=cell),
        *numbers("bus GB/s: latest.bus_bandwidth_gb_per_s", form=cell),
        *([] if rated else [Column(unit, lambda change: change.latest.time_s / seconds, number)]),
        *numbers("change %: speed_pct", form=formatted("{:+.1f}")),
    ]
    change = "Change: faster (+) or slower (-) than the previous measurement of the same case."
    caption = change if any(change.previous for change in found) else ""
    return table_of(printable(title), found, columns, caption=caption, drop_empty=True)


def gpus_tables(parts: Parts, rule: OutlierRule) -> Iterator[Table]:
    """Yield a table of devices, or only of slow ones if there are many, and one of failed devices and silent nodes."""
    if parts.measured:
        yield _devices(parts, rule)
    if parts.failed or parts.missing_nodes:
        rows = [
            *((printable(node), row.case, printable(row.reason)) for node, row in parts.failed),
            *((printable(node), "", "the node reported nothing") for node in parts.missing_nodes),
        ]
        yield rows_table("Not measured", ("node", "part", "reason"), rows)


def _devices(parts: Parts, rule: OutlierRule) -> Table:
    slow, many = parts.slow, len(parts.measured) > MOST_DEVICES
    shown = slow if many else sorted(parts.measured, key=lambda part: (part.row.node, part.row.rank or 0))
    row = parts.measured[0].row
    kinds = dict.fromkeys(part.row.device for part in parts.measured)
    what = f"{row.shape} in {row.dtype} on {len(parts.measured)} devices at once"
    title = printable(f"{what}, {', '.join(kinds)}: {len(slow)} slow")
    columns: list[Column[Part]] = [
        *texts("node: row.node"),
        *numbers("local rank: row.rank", form=str),
        *numbers("TFLOPS: row.tflops"),
        *numbers("below median %: below_pct", form="{:.1f}".format),
        Column("", lambda part: "SLOW" if part.slow else ""),
        *texts("uuid: row.device_uuid", optional=True),
    ]
    caption = (
        f"Median {number(median_tflops(parts))} TFLOPS. Slow: more than {rule.below_pct:g} % and more than "
        f"{rule.sigmas:g} robust standard deviations below the median of devices of the same name."
    )
    if len(parts.measured) < rule.least_devices:
        why = "of two, either may be the slow one"
        caption = f"Slow devices are not identified among fewer than {rule.least_devices}: {why}."
    return table_of(title, shown, columns, caption=caption)


def advice(parts: Parts) -> str | None:
    """Return the advice about unfit nodes; None if there are none."""
    nodes = ",".join(parts.unfit_nodes)
    if not nodes:
        return None
    return f"run 'llmb doctor' on these nodes to find the cause; until it is fixed: llmb submit --exclude {nodes}"


WORDS = {True: "fit", False: "UNFIT", None: "undecided"}
ORDER = (False, None, True)
MOST_FIT = 16
"""If more nodes than this are fit, they are only in the table of node lists."""


def pairs_document(result: PairwiseResult, host_list: HostList) -> dict[str, Any]:
    """Return the JSON of a pairwise measurement; its keys are a contract. ``fit`` is null for an undecided node."""
    names = [verdict.node for verdict in result.nodes]
    return {
        **fields_of(result, "started_at", "expected_s", "limit_s", "took_s"),
        **fields_of(result, "nodes", "notes"),
        "fit_nodes": host_list(result.names(fit=True)),
        "unfit_nodes": host_list(result.names(fit=False)),
        "undecided_nodes": host_list(result.names(fit=None)),
        "group": result.group,
        "alone": [
            {"node": names[one.node], **one.figures.model_dump(), "problem": one.problem} for one in result.alone
        ],
        "pairs": [
            {
                "nodes": [names[pair.first], names[pair.second]],
                **fields_of(pair, "round", "problem"),
                **pair.figures.model_dump(),
            }
            for pair in result.pairs
        ],
    }


def pairs_tables(result: PairwiseResult, host_list: HostList) -> Iterator[Table]:
    """Yield a table of nodes, the worst first, without the fit ones if they are many, and a table of lists of nodes."""
    took = f"{duration(result.took_s)} (expected: {duration(result.expected_s)}, at most {duration(result.limit_s)})"
    fit, unfit = result.names(fit=True), result.names(fit=False)
    shown = [one for one in result.nodes if not one.fit or len(fit) <= MOST_FIT]
    columns: list[Column[NodeVerdict]] = [
        *texts("node"),
        Column("", "fit", WORDS.__getitem__),
        Column("by what", lambda one: "\n".join(map(printable, one.evidence)) or _own(result, one), str),
    ]
    at_once = [f"All {len(fit)} fit nodes at once: {_text(result.group)}"] if result.group else []
    title = f"{len(result.nodes)} nodes alone and in pairs, in {took}"
    notes = (printable(f"{note}.") for note in (*result.notes, *at_once))
    yield table_of(title, sorted(shown, key=lambda one: ORDER.index(one.fit)), columns, caption=notes)
    kinds = {"fit": fit, "unfit": unfit, "undecided": result.names(fit=None)}
    without = printable(f"Without them: llmb submit --exclude unfit, or --exclude {host_list(unfit)}") if unfit else ""
    yield node_lists_table(kinds, host_list, without)


def _own(result: PairwiseResult, verdict: NodeVerdict) -> str:
    place = result.nodes.index(verdict)
    alone = next((one.figures for one in result.alone if one.node == place), PairFigures())
    pairs = (pair.figures for pair in result.pairs if pair.has((place,)) and not pair.problem)
    best = max(pairs, key=lambda figures: figures.gb_per_s or 0.0, default=PairFigures())
    parts = (f"{what} {_text(figures)}" for what, figures in (("alone", alone), ("in pairs", best)) if _text(figures))
    return "; ".join(parts)


def _text(figures: PairFigures) -> str:
    latency = None if figures.latency_s is None else 1e6 * figures.latency_s
    units = ((figures.tflops, "TFLOPS"), (figures.gb_per_s, "GB/s"), (latency, "us"))
    return ", ".join(f"{cell(value)} {unit}" for value, unit in units if value is not None)

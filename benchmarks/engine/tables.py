# SPDX-License-Identifier: Apache-2.0
"""The document as tables for people."""

from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.engine.engines.registry import LLMB
from benchmarks.engine.records import CaseResult, Document
from benchmarks.engine.verdicts import merged
from llmb.traces.breakdown import PARTS

NONE = "n/a"
VERDICTS = {"reached": "reached", "not_reached": "NOT reached", "not_measured": "not measured"}


def tables(document: Document) -> Group:
    cases = merged(document.cases)
    done = [case for case in cases if case.status == "done"]
    profiled = [case for case in done if case.breakdown]
    return Group(
        *([case_table(done)] if done else []),
        *([floor_table(document)] if document.ceilings and document.ceilings.floors else []),
        *([breakdown_table(profiled)] if profiled else []),
        *verdict_lines(document),
        *(Text(f"{case.status.replace('_', ' ')}: {case.label}: {case.reason}")
          for case in cases if case.status != "done"),
        *(Text(f"outdated: {case.label}: {case.outdated}") for case in done if case.outdated),
        *footnotes(document),
    )  # fmt: skip


def case_table(cases: Sequence[CaseResult]) -> Table:
    table = _table("Engines, median step", "model", "engine", left=2)
    for column in ("micro-b", "layers", "step s", "spread %", "tokens/s", "llmb/other", "TFLOPS", "MFU % published",
                   "full", "causal", "paper %", "products %", "kernels %", "sustained %", "GiB"):  # fmt: skip
        table.add_column(column, justify="right")
    own = {case.setup[2:]: case for case in cases if case.engine == LLMB and case.variant is None}
    for case in cases:
        times, mfu, tflops = case.step_times_s, case.mfu_pct or {}, case.tflops or {}
        table.add_row(
            f"{case.model} {case.dtype}",
            case.name,
            str(case.ga),
            str(case.layers),
            _number(median(times)),
            _number(100 * (max(times) - min(times)) / median(times)),
            f"{case.tokens_per_s:,.0f}",
            _ratio(own.get(case.setup[2:]), case),
            _number(tflops.get("full")),
            *(_number(mfu.get(convention)) for convention in ("published", "full", "causal")),
            _number(case.published_mfu_pct),
            _number(case.product_share_pct),
            _number(case.kernel_share_pct),
            _number(case.sustained_share_pct),
            _number(case.peak_memory_gib),
        )
    return table


def _ratio(own: CaseResult | None, other: CaseResult) -> str:
    if own is None or own is other or not own.tokens_per_s or not other.tokens_per_s:
        return ""
    return f"{own.tokens_per_s / other.tokens_per_s:.2f}"


def floor_table(document: Document) -> Table:
    """The time of one micro-batch with the kernels alone."""
    table = _table("The device's own kernels, one micro-batch", "model", left=1)
    for column in ("products TFLOPS", "sustained %", "products s", "attention s", "attention by"):
        table.add_column(column, justify="right")
    assert document.ceilings is not None
    for floor in document.ceilings.floors:
        table.add_row(
            f"{floor.name} {floor.dtype}",
            _number(floor.products_tflops),
            _number(100 * floor.sustained if floor.sustained else None),
            _number(floor.products_s),
            _number(floor.attention_s),
            floor.attention_backend or floor.reason,
        )
    copied = (document.ceilings.measured or {}).get("copy")
    if copied and copied["gb_s"] is not None:
        table.caption = f"memory copy {copied['gb_s']:,.0f} GB/s, read and written"
    return table


def breakdown_table(cases: Sequence[CaseResult]) -> Table:
    """Where the time of a profiled step went."""
    table = _table("A profiled step, ms", "model", "engine", left=2)
    for part in ("duration_s", *PARTS):
        table.add_column(part.removesuffix("_s").replace("_", " "), justify="right")
    for case in cases:
        parts = case.breakdown or {}
        figures = (_number(1000 * parts[part]) for part in ("duration_s", *PARTS))
        table.add_row(f"{case.model} {case.dtype}", case.name, *figures)
    return table


def verdict_lines(document: Document) -> list[Text]:
    lines = []
    for verdict in document.verdicts:
        figures = (
            f": {_number(verdict.measured)} to {_number(verdict.target)}" if verdict.margin_pct is not None else ""
        )
        margin = f" ({verdict.margin_pct:+.1f} %)" if verdict.margin_pct is not None else ""
        reason = f": {verdict.reason}" if verdict.reason else ""
        apart = verdict.rounds_differ_pct
        rounds = f", rounds differ by {apart:.1f} %" if apart is not None else ""
        label = f"{verdict.model} {verdict.dtype}, {verdict.micro_batches} micro-batches, {verdict.against}"
        lines.append(Text(f"{VERDICTS[verdict.verdict]}: {label}{figures}{margin}{rounds}{reason}"))
    return lines


def footnotes(document: Document) -> list[Text]:
    ceilings = document.ceilings
    notes = [
        "paper %: published MFU of the full model; products %: TFLOPS (causal) divided by the rate of matrix products"
        " alone; kernels %: time of products and attention alone divided by the step time; sustained %: the same with"
        " products at the rate that is kept for seconds.",
    ]
    if ceilings and ceilings.reason:
        notes.append(f"kernels not measured: {ceilings.reason}")
    return [Text(note) for note in notes]


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, box=None, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"

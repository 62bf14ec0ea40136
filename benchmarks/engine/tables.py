# SPDX-License-Identifier: Apache-2.0
"""The document as readable tables."""

import re
from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.engine.engines.registry import LLMB
from benchmarks.engine.records import CaseResult, Document
from benchmarks.engine.verdicts import merged
from llmb.readers.profiles.breakdown import PARTS

NONE = "n/a"
VERDICTS = {"reached": "reached", "not_reached": "NOT reached"}
SECONDS = re.compile(r"budget: .*")


def tables(document: Document) -> Group:
    """Each table has at most 80 columns."""
    cases = merged(document.cases)
    done = [case for case in cases if case.status == "done"]
    profiled = [case for case in done if case.breakdown]
    return Group(
        *([speed_table(done), mfu_table(done), share_table(done)] if done else []),
        *([floor_table(document)] if document.ceilings and document.ceilings.floors else []),
        *(breakdown_table(case) for case in profiled),
        *verdict_lines(document),
        *failures(cases),
        *(Text(f"outdated: {case.label}: {case.outdated}") for case in done if case.outdated),
        *grouped("not run", ((case.label, case.reason) for case in cases if case.status == "not_run")),
        *footnotes(document),
    )


def speed_table(cases: Sequence[CaseResult]) -> Table:
    table = _table("Engines, median step", "model", "engine", left=2)
    for column in ("mb", "step s", "+-%", "tokens/s", "ratio", "GiB"):
        table.add_column(column, justify="right")
    own = {case.setup[2:]: case for case in cases if case.engine == LLMB and case.variant is None}
    for case in cases:
        times = case.step_times_s
        table.add_row(
            *_names(case),
            _number(median(times)),
            _percent(100 * (max(times) - min(times)) / median(times)),
            f"{case.tokens_per_s:,.0f}",
            _ratio(own.get(case.setup[2:]), case),
            _percent(case.peak_memory_gib),
        )
    return table


def mfu_table(cases: Sequence[CaseResult]) -> Table:
    table = _table("MFU %", "model", "engine", left=2)
    for column in ("mb", "TFLOPS", "paper", "alike", "full", "causal"):
        table.add_column(column, justify="right")
    for case in cases:
        mfu = case.mfu_pct or {}
        figures = (case.published_mfu_pct, *(mfu.get(convention) for convention in ("published", "full", "causal")))
        table.add_row(*_names(case), _number((case.tflops or {}).get("full")), *map(_percent, figures))
    return table


def share_table(cases: Sequence[CaseResult]) -> Table:
    """How much of the speed of the device's own kernels is reached."""
    table = _table("The device's own kernels = 100 %", "model", "engine", left=2)
    for column in ("mb", "products", "kernels", "sustained"):
        table.add_column(column, justify="right")
    for case in cases:
        shares = (case.product_share_pct, case.kernel_share_pct, case.sustained_share_pct)
        table.add_row(*_names(case), *map(_percent, shares))
    return table


def _names(case: CaseResult) -> tuple[str, str, str]:
    return f"{case.model} {case.dtype}", case.name, str(case.ga)


def _ratio(own: CaseResult | None, other: CaseResult) -> str:
    if own is None or own is other or not own.tokens_per_s or not other.tokens_per_s:
        return ""
    return f"{own.tokens_per_s / other.tokens_per_s:.2f}"


def floor_table(document: Document) -> Table:
    """The time of one micro-batch with the kernels alone."""
    table = _table("The device's own kernels, one micro-batch", "model", left=1)
    for column in ("TFLOPS", "sustained %", "products s", "attention s", "attention by"):
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


def breakdown_table(case: CaseResult) -> Table:
    """Where the time of a profiled step went."""
    table = _table(f"A profiled step of {case.label}", "part", left=1)
    for column in ("ms", "%"):
        table.add_column(column, justify="right")
    parts = case.breakdown or {}
    whole = parts["duration_s"]
    for part in PARTS:
        if parts[part]:
            name = part.removesuffix("_s").replace("_", " ")
            table.add_row(name, _number(1000 * parts[part]), _percent(100 * parts[part] / whole))
    return table


def verdict_lines(document: Document) -> list[Text]:
    lines, unknown = [], []
    for verdict in document.verdicts:
        label = f"{verdict.model} {verdict.dtype}, {verdict.micro_batches} micro-batches, {verdict.against}"
        if verdict.margin_pct is None:
            unknown.append((label, verdict.reason))
            continue
        apart = verdict.rounds_differ_pct
        rounds = f", rounds differ by {apart:.1f} %" if apart is not None else ""
        figures = f"{_number(verdict.measured)} to {_number(verdict.target)} ({verdict.margin_pct:+.1f} %)"
        lines.append(Text(f"{VERDICTS[verdict.verdict]}: {label}: {figures}{rounds}"))
    return [*lines, *grouped("not measured", unknown)]


def failures(cases: Sequence[CaseResult]) -> list[Text]:
    failed = [Text(f"failed: {case.label}: {case.reason}") for case in cases if case.status == "failed"]
    return [*failed, Text("What failed is run again with --retry-failed.")] if failed else []


def grouped(what: str, items: Iterable[tuple[str, str | None]]) -> list[Text]:
    """One line per reason, whose seconds differ if it is the budget."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in items:
        by_reason.setdefault(SECONDS.sub("no time left", reason or ""), []).append(label)
    return [Text(f"{what}, {reason}: {'; '.join(labels)}") for reason, labels in by_reason.items()]


def footnotes(document: Document) -> list[Text]:
    ceilings = document.ceilings
    notes = [
        "mb: micro-batches per step; +-%: slowest minus fastest step; ratio: llmb's tokens/s divided by the engine's;"
        " paper: published MFU of the full model, with which 'alike' is counted; products: TFLOPS (causal) divided by"
        " the rate of matrix products alone; kernels: time of products and attention alone divided by the step time;"
        " sustained: the same with products at the rate that is kept for seconds."
    ]
    if ceilings and ceilings.reason:
        notes.append(f"kernels not measured: {ceilings.reason}")
    return [Text(note) for note in notes]


def _table(title: str, *columns: str, left: int) -> Table:
    table = Table(title=title, box=None, title_justify="left", caption_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"

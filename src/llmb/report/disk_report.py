# SPDX-License-Identifier: Apache-2.0
"""Rates of a file system and what they mean for a checkpoint, as tables and as a JSON document."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmb.microbenchmarks.disk import Prediction
from llmb.microbenchmarks.records import MeasurementFile
from llmb.report.bench_report import measurement_document
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable


def disk_document(measured: MeasurementFile, predicted: Prediction | None) -> dict[str, Any]:
    """What is kept, and what it means for a checkpoint: None without a recipe."""
    return {"measured": measurement_document(measured), "checkpoint": predicted and asdict(predicted)}


def disk_tables(measured: MeasurementFile, predicted: Prediction | None, folder: Path) -> Iterator[Table]:
    rows = measured.measurements
    first = rows[0]
    files = f"{first.ranks} file{'' if first.ranks == 1 else 's'} at once"
    title = printable(f"{folder} ({first.device}), {files}, {first.shape}")
    table = result_table(title, "", "bytes of a file", "s", "GB/s", right=("bytes of a file", "s", "GB/s"))
    for row in rows:
        table.add_row(row.case, f"{row.size_bytes:,}", number(row.time_s), number(row.bandwidth_gb_per_s))
    table.caption = "Writing ends when fsync has returned in all processes. Read by the node that wrote."
    yield table
    if predicted:
        yield _predicted(predicted, printable(measured.recipe or ""))


def _predicted(predicted: Prediction, recipe: str) -> Table:
    what = f"Checkpoint of {predicted.checkpoint_bytes / 1e9:,.3g} GB from {predicted.nodes} node"
    title = f"{what}{'' if predicted.nodes == 1 else 's'}: {recipe}"
    save, load = (predicted.save_each_s, predicted.save_shared_s), (predicted.load_each_s, predicted.load_shared_s)
    if predicted.nodes == 1:
        table = result_table(title, "predicted", "s", right=("s",))
        table.add_row("save", number(save[0]))
        table.add_row("load", number(load[0]))
        return table
    headers = ("s if each node has this rate", "s if all nodes share it")
    table = result_table(title, "predicted", *headers, right=headers)
    table.add_row("save", *map(number, save))
    table.add_row("load", *map(number, load))
    return table

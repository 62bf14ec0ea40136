# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a table and a JSON document."""

from typing import Any

from llmb.report.lora_text import lora_text
from llmb.report.numbers import number, unknown
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.runs.checkpoint import SavedCheckpoint
from llmb.runs.initial_weights import base_text

IMPORTED = unknown("imported weights")


def checkpoint_document(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """The JSON of ``llmb checkpoint show``; its keys are a contract."""
    record = checkpoint.record.model_dump(mode="json")
    return {"path": str(checkpoint.path), "size_bytes": checkpoint.size_bytes, **record}


def checkpoint_table(checkpoint: SavedCheckpoint) -> Table:
    record, layout = checkpoint.record, checkpoint.record.layout
    table = result_table(f"Checkpoint: {checkpoint.path.name}", "", "")
    table.add_row("workload", f"{record.workload} {record.size}")
    table.add_row("model", f"{record.model.model}, {record.model.layers} layers, vocabulary {record.model.vocab_size}")
    if record.lora and record.base:
        table.add_row("contains", f"adapters only: {lora_text(record.lora)}")
        table.add_row("base", base_text(record.base))
    if record.origin:
        table.add_row("weights", f"{record.origin.weights.text}, before the first step")
        table.add_row("data", record.origin.data.text)
    table.add_row("step", f"{record.step}, {record.consumed_samples:,} samples consumed")
    table.add_row("dtype of the weights", ", ".join(record.weights_dtypes))
    table.add_row("optimizer state", "yes" if record.optimizer_state else "no: training begins with a new one")
    table.add_row("dtype of the run", str(record.dtype or IMPORTED))
    sizes = f"TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, EP {layout.ep}, DP {layout.dp}" if layout else IMPORTED
    table.add_row("saved by", f"{layout.gpus} processes, {sizes}" if layout else sizes)
    table.add_row("seed", IMPORTED if record.seed is None else str(record.seed))
    if record.imported_from:
        table.add_row("imported from", record.imported_from.path)
    table.add_row("saved at", f"{record.saved_at}, llmb {record.llmb_version}")
    table.add_row("size", f"{number(checkpoint.size_bytes / 1e9)} GB in {len(record.files)} files")
    table.add_row("checksums", "CRC-32 of every file")
    table.add_row("path", str(checkpoint.path))
    return table

# SPDX-License-Identifier: Apache-2.0
"""A prepared dataset as tables and a JSON document."""

from typing import Any

from llmb.prepare.dataset import PackedFolder, PreparedDataset
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

MB = 10**6
COLUMNS = ("split", "packed to", "documents", "left out", "packs", "full", "tokens", "mean squares", "MB", "state")


def dataset_document(prepared: PreparedDataset) -> dict[str, Any]:
    """The JSON of ``llmb prepare dataset``; its keys are a contract."""
    return {
        "path": str(prepared.folder),
        "made": prepared.samples_made,
        **prepared.samples.model_dump(mode="json"),
        "packed": [
            {
                "path": str(packed.path),
                "made": packed.made,
                "fill": packed.record.fill,
                "places_per_pack": packed.record.places_per_pack,
                "squares_per_pack": packed.record.squares_per_pack,
                **packed.record.model_dump(mode="json"),
            }
            for packed in prepared.packed
        ],
    }


def dataset_tables(prepared: PreparedDataset) -> list[Table]:
    samples = prepared.samples
    about = result_table(f"Dataset: {prepared.folder.name}", "", "")
    about.add_row("source", printable(samples.source))
    about.add_row("splits", samples.split_rule)
    about.add_row("template", samples.template)
    counts = ", ".join(f"{count:,} {split}" for split, count in samples.samples.items())
    about.add_row("samples", f"{counts}; {samples.without_answer:,} without an answer left out")
    tokenizers = {packed.record.tokenizer.name: packed.record.tokenizer for packed in prepared.packed}
    for tokenizer in tokenizers.values():
        about.add_row("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens, EOS {tokenizer.eos_id}")
    about.add_row("path", str(prepared.folder))
    table = result_table("Packed", *COLUMNS, right=COLUMNS[1:-1])
    for packed in prepared.packed:
        table.add_row(*_row(packed))
    table.caption = "full: share of all places that documents take; mean squares: squared lengths of documents, a pack"
    return [about, table]


def _row(packed: PackedFolder) -> tuple[str, ...]:
    record = packed.record
    return (
        record.split,
        str(record.seq_len),
        f"{record.documents:,}",
        f"{record.left_out:,}",
        f"{record.packs:,}",
        f"{record.fill:.2%}",
        f"{record.places:,}",
        f"{record.squares_per_pack:,.0f}",
        f"{sum(record.files.values()) / MB:.1f}",
        "new" if packed.made else "kept",
    )

# SPDX-License-Identifier: Apache-2.0
"""What is prepared for runs: access to the hub, datasets and checkpoints, as tables and JSON documents."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmb.checkpoints.checkpoint import SavedCheckpoint
from llmb.prepare.checkpoint import PreparedCheckpoint
from llmb.prepare.dataset import PackedFolder, PreparedDataset
from llmb.prepare.hub_access import RepositoryAccess, TokenSource
from llmb.prepare.verify import Item, Verification
from llmb.reference_suite.prepared_data import NemoItem
from llmb.report.recipe_report import lora_text
from llmb.report.table import Column, Table, number, number_column, result_table, table_of, unknown, whole
from llmb.runs.checkpoints import base_text
from llmb.shown_text import printable

MB = 10**6
IMPORTED = unknown("imported weights")
GIB = 2**30
ITEM_KEYS = ("name", "state", "bytes", "documented_gib", "source", "problem", "command")
KNOWN_BY = {True: "checksums verified", False: "sizes compared; --checksums reads the files"}


def access_document(found: Sequence[RepositoryAccess], token: TokenSource | None) -> dict[str, Any]:
    """The JSON of ``llmb prepare access``; its keys are a contract."""
    return {
        "token": token,
        "granted": all(item.state == "granted" for item in found),
        "repositories": [{**asdict(item.repository), "state": item.state, "reason": item.reason} for item in found],
    }


def access_table(found: Sequence[RepositoryAccess]) -> Table:
    columns: list[Column[RepositoryAccess]] = [
        Column("repository", lambda item: item.repository.name),
        Column("for", lambda item: ", ".join(item.repository.needed_for)),
        Column("state", lambda item: item.state),
        Column("page", lambda item: item.repository.page),
    ]
    return table_of("Access to the Hugging Face hub", found, columns)


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
    columns: list[Column[PackedFolder]] = [
        Column("split", lambda packed: packed.record.split),
        number_column("packed to", lambda packed: packed.record.seq_len, str),
        number_column("documents", lambda packed: packed.record.documents, whole),
        number_column("left out", lambda packed: packed.record.left_out, whole),
        number_column("packs", lambda packed: packed.record.packs, whole),
        number_column("full", lambda packed: f"{packed.record.fill:.2%}", str),
        number_column("tokens", lambda packed: packed.record.places, whole),
        number_column("mean squares", lambda packed: f"{packed.record.squares_per_pack:,.0f}", str),
        number_column("MB", lambda packed: f"{sum(packed.record.files.values()) / MB:.1f}", str),
        Column("state", lambda packed: "new" if packed.made else "kept"),
    ]
    table = table_of("Packed", prepared.packed, columns)
    table.caption = "full: share of all places that documents take; mean squares: squared lengths of documents, a pack"
    return [about, table]


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


def prepared_checkpoint_document(prepared: PreparedCheckpoint) -> dict[str, Any]:
    """The JSON of ``llmb prepare checkpoint``; its keys are a contract."""
    return {"made": prepared.made, **checkpoint_document(prepared.checkpoint)}


def verification_document(found: Verification) -> dict[str, Any]:
    """The JSON of ``llmb prepare verify``; its keys are a contract."""
    return {
        "workload": found.workload,
        "size": found.size,
        "path": str(found.folders.path),
        "complete": not found.lacking,
        "checksums": found.checksums,
        "free_bytes": found.free_bytes,
        "needed_bytes": found.needed_bytes,
        "items": [
            {"path": str(item.path), **{name: getattr(item, name) for name in ITEM_KEYS}} for item in found.items
        ],
        "nemo": [
            {"path": str(item.path), "name": item.name, "state": item.state, "problem": item.problem}
            for item in found.nemo
        ],
    }


def verification_tables(found: Verification) -> list[Table]:
    """The items, and what is wrong with each that is not complete, with the command that gets it."""
    columns: list[Column[Item]] = [
        Column("folder", _short),
        Column("state", lambda item: item.state),
        number_column("GiB", lambda item: item.bytes, _gib),
        number_column("documented", lambda item: item.documented_gib, lambda gib: "" if gib is None else f"{gib:g}"),
    ]
    table = table_of(f"Prepared: {found.workload} {found.size}", found.items, columns)
    about = result_table("Storage", "", "")
    about.add_row("path", str(found.folders.path))
    for item in found.items:
        if item.source and "/packed/" not in item.name:
            about.add_row(item.name.partition("/")[0], f"from {printable(item.source)}")
    about.add_row("verified by", KNOWN_BY[found.checksums])
    about.add_row("free", f"{_gib(found.free_bytes)} GiB")
    if found.needed_bytes:
        about.add_row(
            "needed", f"about {_gib(found.needed_bytes)} GiB for the checkpoint; a download takes as much again"
        )
    tables = [table, about]
    if found.nemo:
        nemo: list[Column[NemoItem]] = [
            Column("folder", lambda item: item.name),
            Column("state", lambda item: item.state),
            Column("problem", lambda item: item.problem or "", printable),
        ]
        tables.append(table_of("In NeMo's form, for --framework reference_suite", found.nemo, nemo))
    if problems := [item for item in found.items if item.problem]:
        wrong: list[Column[Item]] = [Column("folder", _short), Column("problem", lambda item: item.problem, printable)]
        tables.append(table_of("Not complete", problems, wrong))
    return tables


def _short(item: Item) -> str:
    """Without the folder of the tokenizer, which has the name of the model."""
    return f"packed {item.path.name}" if "/packed/" in item.name else item.name


def _gib(size: int) -> str:
    """To three digits."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"

# SPDX-License-Identifier: Apache-2.0
"""What is prepared for a fine-tuning, as tables and JSON documents."""

from typing import Any

from llmb.prepare.checkpoint import PreparedCheckpoint
from llmb.prepare.verify import Item, Verification
from llmb.report.checkpoint_report import checkpoint_document
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable

GIB = 2**30
NUMBERS = ("GiB", "documented")
KNOWN_BY = {True: "checksums verified", False: "sizes compared; --checksums reads the files"}


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
            {
                "name": item.name,
                "path": str(item.path),
                "state": item.state,
                "bytes": item.bytes,
                "documented_gib": item.documented_gib,
                "source": item.source,
                "problem": item.problem,
                "command": item.command,
            }
            for item in found.items
        ],
    }


def verification_tables(found: Verification) -> list[Table]:
    """The items, and what is wrong with each that is not complete, with the command that gets it."""
    table = result_table(
        f"Prepared: {found.workload} {found.size}", "folder", "state", "GiB", "documented", right=NUMBERS
    )
    for item in found.items:
        table.add_row(_short(item), item.state, _gib(item.bytes), _documented(item))
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
    if problems := [item for item in found.items if item.problem]:
        wrong = result_table("Not complete", "folder", "problem")
        for item in problems:
            wrong.add_row(_short(item), printable(item.problem))
        tables.append(wrong)
    return tables


def _short(item: Item) -> str:
    """Without the folder of the tokenizer, which has the name of the model."""
    return f"packed {item.path.name}" if "/packed/" in item.name else item.name


def _documented(item: Item) -> str:
    return "" if item.documented_gib is None else f"{item.documented_gib:g}"


def _gib(size: int) -> str:
    """To three digits."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"

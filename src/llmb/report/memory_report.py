# SPDX-License-Identifier: Apache-2.0
"""Tables and JSON of the memory that ranks take."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmb.catalogue.records import Recipe
from llmb.predict.remedies import Remedy
from llmb.report.recipe_report import identity_document
from llmb.report.table import Column, Table, number, number_column, table_of
from llmb.runs.rank_account import GIB, MARGIN_GIB, OWNERS, CollectiveCount, MemoryUse, RankAccount, RankMemory

SHOWN = ("kind", "group", "count", "bytes")
"""What is shown of collectives."""


def memory_document(recipe: Recipe, use: MemoryUse, found: Sequence[Remedy]) -> dict[str, Any]:
    """The JSON of ``llmb memory``; its keys are a contract."""
    return {
        **identity_document(recipe),
        "method": use.method,
        "capacity_gib": use.capacity_gib,
        "margin_gib": MARGIN_GIB,
        "needed_gib": use.needed_gib,
        "fits": use.fits,
        "assumptions": list(use.assumptions),
        "remedies": [asdict(each) for each in found],
        "ranks": [_rank_document(each) for each in use.ranks],
    }


def _rank_document(memory: RankMemory) -> dict[str, Any]:
    document: dict[str, Any] = {
        "rank": memory.rank,
        "pp_stage": memory.pp_stage,
        "peak_gib": memory.peak_bytes / GIB,
        **{f"{owner}_gib": memory.bytes_by_owner[owner] / GIB for owner in OWNERS},
    }
    if isinstance(memory, RankAccount):  # an estimate is of memory alone
        document |= {
            "flops": memory.flops,
            "collectives": [each.model_dump(include=set(SHOWN)) for each in memory.collectives],
        }
    return document


def memory_tables(recipe: Recipe, use: MemoryUse, found: Sequence[Remedy]) -> Iterator[Table]:
    """``found``: with what it would fit, if it does not."""
    columns = [
        Column[RankMemory]("rank", lambda each: each.rank, right=True),
        Column[RankMemory]("stage", lambda each: each.pp_stage, right=True),
        number_column("peak GiB", lambda each: each.peak_bytes / GIB),
        *(_owner_column(owner) for owner in OWNERS),
    ]
    if use.method == "exact":
        columns.append(
            number_column("TFLOPs", lambda each: each.flops / 1e12 if isinstance(each, RankAccount) else None)
        )
    memory = table_of(recipe.title(), use.ranks, columns)
    memory.caption = "\n".join([fits_text(use), *(f"assumed: {each}" for each in use.assumptions)])
    yield memory
    if use.fits is False:
        yield _remedy_table(found)
    fullest = use.fullest
    if isinstance(fullest, RankAccount) and fullest.collectives:
        yield table_of(
            f"collectives of rank {fullest.rank} in a step",
            fullest.collectives,
            [
                Column[CollectiveCount]("kind", lambda each: each.kind),
                Column[CollectiveCount]("group", lambda each: each.group),
                number_column("number", lambda each: each.count),
                number_column("GB", lambda each: each.bytes / 1e9),
            ],
        )


def _owner_column(owner: str) -> Column[RankMemory]:
    return number_column(owner, lambda each: each.bytes_by_owner[owner] / GIB)


def _remedy_table(found: Sequence[Remedy]) -> Table:
    columns = [
        Column[Remedy]("with", lambda each: each.options),
        number_column("needs about GiB", lambda each: each.needed_gib),
        Column[Remedy]("step", lambda each: "" if each.slower_pct is None else f"{each.slower_pct:+.1f} %", right=True),
        Column[Remedy]("at the cost of", lambda each: each.cost),
    ]
    table = table_of("it would fit", found, columns)
    if not found:
        table.caption = "no three options are known with which it would; more GPUs may help"
    return table


def fits_text(use: MemoryUse) -> str:
    """Whether the fullest rank fits, as a sentence."""
    fullest = use.fullest
    about = "about " if use.method == "estimate" else ""
    tensors = f"{about}{number(fullest.peak_bytes / GIB)} GiB for tensors"
    if use.capacity_gib is None:
        return f"rank {fullest.rank} needs {tensors}; the memory of the device is unknown"
    verb = "fits" if use.fits else "does not fit"
    needs = f"{about}{number(use.needed_gib)} of {number(use.capacity_gib)} GiB on stage {fullest.pp_stage}"
    return f"{verb}: rank {fullest.rank} needs {needs}, {tensors} and about {number(MARGIN_GIB)} beside them"

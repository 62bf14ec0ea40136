# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold up a run, by NCCL's RAS and Inspector, as tables and a JSON document."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmb.report.table import Column, Table, as_text, number_column, table_of, whole
from llmb.shown_text import printable
from llmb.traces.nccl_inspector import Inspected, late_text
from llmb.traces.nccl_ras import RasStatus, ras_text
from llmb.traces.nccl_suspects import Suspect, said_of

MOST_ROWS = 40


class NcclStates(NamedTuple):
    """What RAS answered, by file, and what all files of Inspector tell."""

    ras: Sequence[tuple[str, RasStatus]] = ()
    inspected: Inspected | None = None


NO_STATES = NcclStates()


def states_document(states: NcclStates) -> dict[str, Any]:
    return {
        "ras": [{"source": source, **status.model_dump(mode="json")} for source, status in states.ras],
        "inspector": states.inspected and states.inspected.model_dump(mode="json"),
    }


def states_tables(states: NcclStates) -> Iterator[Table]:
    for source, status in states.ras:
        known = f"{whole(status.gpus) or 'unknown'} GPUs, communicators: {status.communicators:,}"
        title = f"RAS of NCCL {status.nccl_version}, {known} ({source})"
        yield _table(title, status.suspects, status.notes if status.suspects else [ras_text(status)])
    if found := states.inspected:
        title = f"Inspector of NCCL: {found.collectives:,} records of {found.processes:,} processes"
        same = [] if found.suspects else ["no rank has completed fewer operations than others"]
        yield _table(title, found.suspects, [*same, *([late_text(found.late)] if found.late else [])])


def _rank(row: Suspect) -> int | str | None:
    """The program's number, where it is known; how many ranks NCCL does not name."""
    own = row.rank if row.program_rank is None else row.program_rank
    return own if own is not None or row.operations is None else row.detail


def _table(title: str, suspects: Sequence[Suspect], notes: Sequence[str]) -> Table:
    columns: list[Column[Suspect]] = [
        number_column("rank", lambda row: _rank(row), as_text),
        Column("node", lambda row: row.node, as_text),
        number_column("process", lambda row: row.pid, as_text),
        number_column("GPU", lambda row: row.gpu, as_text),
        Column("communicator", lambda row: row.communicator, as_text),
        Column("what", said_of),
    ]
    table = table_of(title, suspects[:MOST_ROWS], columns, drop_empty=True)
    hidden = len(suspects) - MOST_ROWS
    more = [f"{hidden} more rows are left out, see --json"] if hidden > 0 else []
    table.caption = "\n".join(f"{printable(note)}." for note in (*notes, *more)) or None
    return table

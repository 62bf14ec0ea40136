# SPDX-License-Identifier: Apache-2.0
"""What a workload's document says of the FLOPs of one sequence."""

from llmb.catalogue.load import Catalogue
from llmb.catalogue.published import PublishedFlops
from llmb.catalogue.records import Layout, Packing
from llmb.catalogue.schema import LayoutTable, WorkloadFile


def published_flops(
    catalogue: Catalogue, workload: WorkloadFile, table: LayoutTable, layout: Layout
) -> PublishedFlops | None:
    """The document's own count: its printed value if that is for this shape, else its formula."""
    entries = [
        entry for entry in workload.published_flops if (entry.size, entry.document) == (table.size, table.document)
    ]
    if not entries:
        return None
    shape = (layout.seq_len, layout.layers)
    printed = next((entry for entry in entries if (entry.seq_len, entry.layers) == shape), None)
    entry = printed or next((entry for entry in entries if entry.printed_flops is None), entries[0])
    return PublishedFlops(
        printed_flops=printed.printed_flops if printed else None,
        source=catalogue.documents[entry.document].source,
        **entry.model_dump(include={"formula", "as_published", "line", "notes"}),
    )


def packing_of(workload: WorkloadFile, layout: Layout) -> Packing | None:
    fields = {"seq_len"}
    found = (entry for entry in workload.packing if entry.seq_len == layout.seq_len)
    return next((Packing(**entry.model_dump(exclude=fields)) for entry in found), None)

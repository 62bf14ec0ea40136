# SPDX-License-Identifier: Apache-2.0
"""The scales of layout tables in words."""

from collections.abc import Iterable

from llmb.catalogue.schema import LayoutRow, LayoutTable


def scale_name(row: LayoutRow) -> str:
    return f"{row.gpus} (proxy)" if row.proxy else str(row.gpus)


def by_size(row: LayoutRow) -> tuple[bool, int]:
    """Proxies last."""
    return row.proxy, row.gpus


def scales_above(tables: Iterable[LayoutTable]) -> list[str]:
    """The scales above the largest that is listed, in words."""
    largest = max((table.rows[-1].gpus, table.above_largest) for table in tables)
    return {"any": ["any"], "double": [f"doublings of {largest[0]}"], "refuse": []}[largest[1]]

# SPDX-License-Identifier: Apache-2.0
"""What the catalogue has, as ``llmb list`` shows it. Pure."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from llmb.catalogue.resolve import gpu_types_of, releases_of, sizes_of
from llmb.catalogue.schema import LayoutTable, WorkloadFile
from llmb.report.table import Table, result_table

LEGEND = (
    "(n): a PROXY, with fewer layers than the model; +: doublings of the largest scale too; llmb: no document;"
    " all: every GPU type"
)


def list_document(workloads: Iterable[WorkloadFile]) -> dict[str, Any]:
    return {"workloads": [_workload_document(workload) for workload in workloads]}


def _workload_document(workload: WorkloadFile) -> dict[str, Any]:
    return {
        "workload": workload.workload,
        "title": workload.title,
        "task": workload.task,
        "sizes": {
            size: {
                "releases": releases_of(workload, size),
                "gpu_types": gpu_types_of(workload, size),
                "layouts": [_table_document(table) for table in _layout_tables(workload, size)],
            }
            for size in sizes_of(workload)
        },
    }


def _table_document(table: LayoutTable) -> dict[str, Any]:
    return {
        "release": table.release,
        "gpu_types": list(table.gpu_types),
        "dtypes": list(table.dtypes),
        "scales": [row.gpus for row in table.rows if not row.proxy],
        "proxy_scales": [row.gpus for row in table.rows if row.proxy],
        "above_largest": table.above_largest,
    }


def list_table(workloads: Iterable[WorkloadFile], gpu_types: Collection[str]) -> Table:
    """``gpu_types`` are all that the catalogue has."""
    table = result_table("Recipes", "workload", "size", "release", "GPU types", "dtypes", "scales")
    for workload in workloads:
        for size in sizes_of(workload):
            for (release, dtypes, scales), gpus in _grouped_types(_layout_tables(workload, size)).items():
                table.add_row(workload.workload, size, release, _types_text(gpus, gpu_types), dtypes, scales)
    table.caption = LEGEND
    return table


def _types_text(types: Sequence[str], known: Collection[str]) -> str:
    rest = [name for name in types if name not in known]
    return " ".join(["all", *rest] if {*known} <= {*types} else types)


def _grouped_types(tables: Iterable[LayoutTable]) -> dict[tuple[str, str, str], list[str]]:
    """GPU types grouped by release, dtypes and scales."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        key = (table.release or "llmb", " ".join(table.dtypes), _scales_text(table))
        groups.setdefault(key, []).extend(table.gpu_types)
    return groups


def _layout_tables(workload: WorkloadFile, size: str) -> list[LayoutTable]:
    return [table for table in workload.layouts if table.size == size]


def _scales_text(table: LayoutTable) -> str:
    if table.above_largest == "any":
        return "any"
    scales = " ".join(f"({row.gpus})" if row.proxy else str(row.gpus) for row in table.rows)
    return f"{scales} +" if table.above_largest == "double" else scales

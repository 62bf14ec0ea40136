# SPDX-License-Identifier: Apache-2.0
"""Expands what a workload defines for kinds of GPU to the GPU types of the catalogue. Pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from llmb.catalogue.records import Gpu
from llmb.catalogue.schema import JobEntry, JobsEntry, LayoutTable, WorkloadFile

Entry = TypeVar("Entry", LayoutTable, JobEntry)


def for_gpus(workload: WorkloadFile, gpus: Mapping[str, Gpu]) -> WorkloadFile:
    """The workload with every GPU type by name: those that ``gpus_with`` describes, and the types each borrows from."""
    jobs = workload.jobs.model_copy(
        update={name: _named(getattr(workload.jobs, name), gpus) for name in JobsEntry.model_fields}
    )
    layouts = _named(workload.layouts, gpus)
    published = {gpu_type for table in layouts if table.release for gpu_type in table.gpu_types}
    borrowed = {
        gpu_type: base
        for gpu_type, gpu in gpus.items()
        if gpu_type not in published and (base := next((name for name in gpu.borrows if name in published), None))
    }
    return workload.model_copy(
        update={"jobs": jobs, "layouts": layouts, "borrowed_layouts": {**borrowed, **workload.borrowed_layouts}}
    )


def _named(entries: Iterable[Entry], gpus: Mapping[str, Gpu]) -> tuple[Entry, ...]:
    """Drops entries that apply to none of ``gpus``: an empty list of GPU types would mean all types."""
    return tuple(named for entry in entries if (named := _with_names(entry, gpus)).gpu_types or entry.gpus_with is None)


def _with_names(entry: Entry, gpus: Mapping[str, Gpu]) -> Entry:
    if entry.gpus_with is None:
        return entry
    kind = entry.gpus_with
    fitting: list[str] = [name for name, gpu in gpus.items() if kind.holds_for(gpu)]
    return entry.model_copy(update={"gpu_types": tuple(dict.fromkeys([*entry.gpu_types, *fitting]))})

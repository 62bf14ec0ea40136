# SPDX-License-Identifier: Apache-2.0
"""Parses names of models: a workload and a size, also as one word such as ``pretrain_llama3.1_8b``."""

from collections.abc import Iterator

from llmb.base.errors import UsageError, unknown
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.custom import check_is_listed
from llmb.catalogue.resolve import find_workload, sized_workload, sizes_of

FIRST, SMALLEST = "pretrain_llama3.1", "tiny"
"""The workload that is meant if only the size ``tiny`` is named, which most workloads have."""


def split_model(catalogue: Catalogue, name: str) -> tuple[str, str | None]:
    """Return the workload, and the size or, if ``name`` has none, None; raise UsageError for an unknown name."""
    workload, size = _parts_of(catalogue, name)
    if size is not None and size not in catalogue.undescribed.get(workload, ()):
        sized_workload(catalogue, workload, size)
    return workload, size


def model_of(catalogue: Catalogue, name: str, size: str | None) -> tuple[str, str]:
    """Return the workload and size named by ``name`` and ``size``; raise UsageError if unknown, missing or
    contradictory."""
    workload, model_size = parse_model(catalogue, name, size)
    sized_workload(catalogue, workload, model_size)
    return workload, model_size


def parse_model(catalogue: Catalogue, name: str, size: str | None) -> tuple[str, str]:
    """Return the workload and the size like ``model_of``, but without checking that the workload has this size."""
    workload, own_size = _parts_of(catalogue, name)
    if own_size and size and own_size != size:
        raise UsageError(f"'{name}' has size {own_size}, but --size is {size}", do="pass only one size")
    model_size = own_size or size
    if not model_size:
        sizes = sizes_of(find_workload(catalogue, workload))
        raise UsageError(f"the size of {workload} is not specified", choices=sizes, do="pass one of these with --size")
    return workload, model_size


def _parts_of(catalogue: Catalogue, name: str) -> tuple[str, str | None]:
    for workload in (*catalogue.workloads, *catalogue.undescribed):
        for known in (workload, workload.partition("_")[2]):
            if name == known:
                return workload, None
            if name.startswith(f"{known}_"):
                return workload, name.removeprefix(f"{known}_")
    if of := [one for one, workload in catalogue.workloads.items() if name in sizes_of(workload)]:
        if name == SMALLEST or len(of) == 1:
            return FIRST if name == SMALLEST else of[0], name
        choices = [f"{one} {name}" for one in of]
        do = "pass one of these workloads with --workload, and the size with --size"
        raise UsageError(f"'{name}' is a size; the workload is missing", choices=choices, do=do)
    check_is_listed(name)
    with_size = _with_size(catalogue) if "_" in name.partition("_")[2] else ()
    raise unknown("workload", name, [*catalogue.workloads, *with_size])


def _with_size(catalogue: Catalogue) -> Iterator[str]:
    for name, workload in catalogue.workloads.items():
        yield from (f"{name}_{size}" for size in sizes_of(workload))

# SPDX-License-Identifier: Apache-2.0
"""What a shell completes: names of the catalogue, and ids of jobs. Modules are imported only for a completion."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmb.errors import LlmbError

if TYPE_CHECKING:
    from llmb.jobs.job import Job

Complete = Callable[..., list[str]]
"""typer passes the parameters that it names."""


def workloads(incomplete: str) -> list[str]:
    from llmb.catalogue.load import Catalogue

    return _begun(Catalogue().workloads, incomplete)


def sizes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The sizes of the workload that was given, else of all."""
    from llmb.catalogue.load import Catalogue
    from llmb.catalogue.resolve import sizes_of

    found = Catalogue().workloads
    given = str(ctx.params.get("workload") or ctx.params.get("workload_argument"))
    chosen = [found[given]] if given in found else found.values()
    return _begun(dict.fromkeys(size for workload in chosen for size in sizes_of(workload)), incomplete)


def dtypes(incomplete: str) -> list[str]:
    from llmb.catalogue.records import Dtype

    return _begun(Dtype, incomplete)


def gpu_types(incomplete: str) -> list[str]:
    from llmb.catalogue.load import Catalogue
    from llmb.catalogue.resolve import CPU

    return _begun([*Catalogue().gpus, CPU], incomplete)


def releases(incomplete: str) -> list[str]:
    from llmb.catalogue.load import Catalogue

    found = {document.release for document in Catalogue().documents.values()}
    return _begun(sorted(found), incomplete)


def runs(incomplete: str) -> list[str]:
    """Ids of the latest runs and jobs, and names of their run folders once the beginning of one is there."""
    jobs = _latest_jobs()
    names = ["latest"] if jobs else []
    for job in jobs:
        names += [name for name in (job.id, job.job_id, job.name if incomplete else None) if name]
    return _begun(names, incomplete)


def labels(incomplete: str) -> list[str]:
    return _begun([job.label for job in _latest_jobs() if job.label], incomplete)


def _latest_jobs() -> list["Job"]:
    """The newest one first; none where they cannot be read: there is nowhere to report that."""
    from llmb.jobs.history import read_history
    from llmb.jobs.store import Filter
    from llmb.runs.folder import chosen_root

    try:
        with read_history(chosen_root(os.environ, Path.cwd()).path, lambda _: None) as store:
            return store.jobs(Filter(limit=MOST_RUNS))[::-1]
    except LlmbError:
        return []


MOST_RUNS = 200
OPTIONS: dict[str, Complete] = {
    "workload": workloads,
    "size": sizes,
    "dtype": dtypes,
    "gpu_type": gpu_types,
    "release": releases,
    "label": labels,
}
"""By name of the option."""


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    """Completes the last name of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in dict.fromkeys(names) if str(name).startswith(last.lower())]

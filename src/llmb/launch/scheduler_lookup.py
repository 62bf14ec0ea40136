# SPDX-License-Identifier: Apache-2.0
"""Schedulers by name; each is imported when it is first used."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, create_model

from llmb.base.errors import UsageError, unknown
from llmb.base.options import Option, options_of
from llmb.base.record import Record
from llmb.catalogue.catalogue import Catalogue
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.scheduler_port import Scheduler
from llmb.launch.site.cluster_config import ClusterConfig
from llmb.launch.site.site import Site, read_site
from llmb.runs.folder import ABSOLUTE, ROOT_KEY
from llmb.runs.record import LOCAL

SCHEDULERS = {
    "slurm": ("llmb.launch.slurm.scheduler", "SlurmScheduler"),
    LOCAL: ("llmb.launch.local", "LocalScheduler"),
}
UNNAMED = next(iter(SCHEDULERS))
"""The scheduler of a cluster whose settings name none."""
USER_KEYS = ("gpu_type", "python", *SCHEDULERS)
"""Keys of cluster_config.yaml that a user may have a default for: personal ones, not the cluster's."""


@cache
def find_scheduler(name: str) -> Scheduler:
    """Find a scheduler. Raises UsageError for a name that does not exist."""
    if name not in SCHEDULERS:
        raise unknown("scheduler", name, SCHEDULERS)
    module, attribute = SCHEDULERS[name]
    scheduler: Scheduler = getattr(import_module(module), attribute)()
    return scheduler


def all_schedulers() -> Iterator[Scheduler]:
    yield from map(find_scheduler, SCHEDULERS)


def scheduler_of(site: Site) -> Scheduler:
    """Return the scheduler that queues the jobs of a cluster."""
    return find_scheduler(site.config.scheduler or UNNAMED)


def scheduler_options() -> Mapping[str, Option]:
    """Return the options of all schedulers, by name, because the cluster's scheduler is known only later."""
    return options_of(*(item.choices for item in all_schedulers()))


def read_job_options(site: Site, values: Mapping[str, Any], environ: Mapping[str, str], python: str) -> JobOptions:
    """Return the options for the site's scheduler, as its ``read_options``.

    Raises UsageError with all that is wrong, and for an option that only another scheduler has.
    """
    scheduler = scheduler_of(site)
    foreign = [item for name, item in scheduler_options().items() if name not in options_of(scheduler.choices)]
    if options := [item.spelled for item in foreign if values.get(item.name)]:
        raise UsageError(f"{scheduler.title}, the scheduler configured here, does not support {', '.join(options)}")
    return scheduler.read_options(values, environ, python)


@cache
def cluster_schema() -> type[ClusterConfig]:
    """Return the schema of cluster_config.yaml with the sections of all schedulers."""
    sections = {item.name: item.settings for item in all_schedulers() if item.settings}
    fields: dict[str, Any] = {name: (schema, Field(default_factory=schema)) for name, schema in sections.items()}
    fields["scheduler"] = (Literal[tuple(SCHEDULERS)] | None, None)
    return create_model("ClusterConfigFile", __base__=ClusterConfig, **fields)


@cache
def user_schema() -> type[BaseModel]:
    """Return the schema of the user's own defaults, which override those of the cluster."""
    fields = {name: field for name, field in cluster_schema().model_fields.items() if name in USER_KEYS}
    kinds: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    kinds[ROOT_KEY] = (Annotated[str, AfterValidator(_absolute)] | None, Field(default=None))
    return create_model("UserConfigFile", __base__=Record, **kinds)


def _absolute(root: str) -> str:
    if not root.startswith(("/", "~")):
        raise ValueError(f"it is relative to the current folder: {ABSOLUTE}")
    return root


def read_cluster_site(catalogue: Catalogue, install: Path, environ: Mapping[str, str]) -> Site:
    """Read the site below ``install``, with the settings of all schedulers. Raises UsageError with all problems."""
    return read_site(catalogue, install, environ, cluster_schema(), user_schema())

# SPDX-License-Identifier: Apache-2.0
"""Finds schedulers by name, importing each when it is first used, and combines their options and settings."""

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
"""The scheduler of a cluster if its settings name none."""
USER_KEYS = ("gpu_type", "python", *SCHEDULERS)
"""Keys of cluster_config.yaml for which users may have defaults of their own."""


@cache
def find_scheduler(name: str) -> Scheduler:
    """Return the scheduler with this name; raise UsageError if there is none."""
    if name not in SCHEDULERS:
        raise unknown("scheduler", name, SCHEDULERS)
    module, attribute = SCHEDULERS[name]
    scheduler: Scheduler = getattr(import_module(module), attribute)()
    return scheduler


def all_schedulers() -> Iterator[Scheduler]:
    yield from map(find_scheduler, SCHEDULERS)


def scheduler_of(site: Site) -> Scheduler:
    """Return the scheduler that the site's settings name, or the default scheduler."""
    return find_scheduler(site.config.scheduler or UNNAMED)


def scheduler_options() -> Mapping[str, Option]:
    """Return the job options of all schedulers, by option name: commands accept them whatever the cluster uses."""
    return options_of(*(item.choices for item in all_schedulers()))


def read_job_options(site: Site, values: Mapping[str, Any], environ: Mapping[str, str], python: str) -> JobOptions:
    """Read the options of a job for the site's scheduler; raise UsageError if an option is invalid, or only another
    scheduler supports it."""
    scheduler = scheduler_of(site)
    foreign = [item for name, item in scheduler_options().items() if name not in options_of(scheduler.choices)]
    if options := [item.spelled for item in foreign if values.get(item.name)]:
        what = f"'scheduler: {scheduler.name}' in cluster_config.yaml does not support {', '.join(options)}"
        raise UsageError(what, do="omit these options, or set another 'scheduler' there")
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
    """Return the schema of the file with the user's own defaults, which override the cluster's settings."""
    fields = {name: field for name, field in cluster_schema().model_fields.items() if name in USER_KEYS}
    kinds: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    kinds[ROOT_KEY] = (Annotated[str, AfterValidator(_absolute)] | None, Field(default=None))
    return create_model("UserConfigFile", __base__=Record, **kinds)


def _absolute(root: str) -> str:
    if not root.startswith(("/", "~")):
        raise ValueError(f"the path is relative: {ABSOLUTE}")
    return root


def read_cluster_site(catalogue: Catalogue, install: Path, environ: Mapping[str, str]) -> Site:
    """Read the site's settings below ``install`` and the user's; raise UsageError if they are invalid."""
    return read_site(catalogue, install, environ, cluster_schema(), user_schema())

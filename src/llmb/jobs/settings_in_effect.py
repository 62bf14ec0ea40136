# SPDX-License-Identifier: Apache-2.0
"""Collects every setting that a job submitted here would use, with its source."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmb.base.secrets import HIDDEN, holds_secret
from llmb.catalogue.catalogue import Catalogue, JobDefaults, find_fabric, job_defaults
from llmb.catalogue.data_files import compose_file, line_in
from llmb.catalogue.resolve import CPU, Request, find_workload, is_tiny, resolve, sizes_of
from llmb.launch.scheduler_lookup import cluster_schema, scheduler_of, user_schema
from llmb.launch.site.cluster_config import (
    ClusterConfig,
    SettingsFile,
    combined,
    has_keys,
    leaves,
    read_cluster_file,
    read_user_file,
)
from llmb.launch.site.site import Site
from llmb.runs.folder import CLUSTER_CONFIG, ROOT_KEY, InstallRoot

SourceKind = Literal["option", "shell", "user", "cluster", "catalogue", "llmb"]
Value = str | int | float | bool | list[Any] | None
CATALOGUE: SourceKind = "catalogue"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting; its value comes from ``place``: a file and line, variable, option, catalogue entry or default."""

    key: str
    value: Value
    source: SourceKind
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsInEffect:
    """The settings in effect, with the files they come from; ``variables`` are the workers' environment variables."""

    install_root: Setting
    files: tuple[SettingsFile, ...]
    settings: tuple[Setting, ...]
    variables: tuple[Setting, ...]


def settings_in_effect(
    catalogue: Catalogue,
    root: InstallRoot,
    environ: Mapping[str, str],
    workload: str | None = None,
    size: str | None = None,
    partition: str | None = None,
) -> SettingsInEffect:
    """Collect the settings for jobs submitted here, of ``workload`` and ``size`` and in ``partition`` if specified.

    Raise UsageError if files or variables are invalid, or the recipe is unknown.
    """
    schema = cluster_schema()
    site_file = read_cluster_file(root.path / CLUSTER_CONFIG, schema)
    user_file = read_user_file(environ, user_schema())
    config = combined(site_file, user_file, schema)
    files = tuple(file for file in (user_file, site_file) if file and file.path.exists())
    site = Site(install=root.path, config=config, shell=environ)
    entries = {item.key: item for item in _of_files(config, files, root.path)}
    variables = {key: item for key, item in entries.items() if key.startswith(("environment.", "workloads."))}
    settings = {key: item for key, item in entries.items() if key not in variables}
    scheduler = scheduler_of(site)
    for item in scheduler.overlays(site, partition):
        below = entries.get(item.place)
        if item.source != "setting":
            settings[item.key] = Setting(item.key, item.value, item.source, item.place)
        elif below and not ((setting := settings.get(item.key)) and setting.source in ("shell", "option")):
            settings[item.key] = Setting(item.key, item.value, below.source, below.place)
    gpu = catalogue.gpus.get(str(settings["gpu_type"].value)) if "gpu_type" in settings else None
    if gpu and scheduler.gpus_key:
        entry = Setting(scheduler.gpus_key, gpu.gpus_per_node, CATALOGUE, f"GPU type {gpu.gpu_type}")
        settings.setdefault(entry.key, entry)
    gpu_type = str(settings["gpu_type"].value) if "gpu_type" in settings else None
    jobs = _jobs_of(catalogue, workload, size, gpu_type) if workload else None
    if jobs and scheduler.time_limit_key:
        of_recipe, defaults = jobs
        place = f"recipe {of_recipe}: {defaults.time_limit_source}"
        entry = Setting(scheduler.time_limit_key, f"{defaults.time_limit_min} minutes", CATALOGUE, place)
        settings.setdefault(entry.key, entry)
    used = list(_variables(catalogue, config, variables, environ, workload, jobs))
    return SettingsInEffect(
        install_root=_root(root, environ),
        files=files,
        settings=tuple(_without_secret(settings[key]) for key in sorted(settings)),
        variables=tuple(_without_secret(item) for item in used),
    )


def _of_files(config: ClusterConfig, files: tuple[SettingsFile, ...], install: Path) -> Iterator[Setting]:
    for keys, value in leaves(config):
        file = next((file for file in files if has_keys(file.data, keys)), None)
        if file is None:
            yield Setting(".".join(keys), value, "llmb", "default")
        else:
            source: SourceKind = "cluster" if file.path.parent == install else "user"
            yield Setting(".".join(keys), value, source, _place(file, keys))


def _place(file: SettingsFile, keys: tuple[str, ...]) -> str:
    """Return the file and line of a key; a file of the reference suite has other keys, so its lines are unknown."""
    name = file.path.name if file.path.name == CLUSTER_CONFIG else str(file.path)
    return f"{name} ({file.form.title})" if file.form else f"{name}:{line_in(compose_file(file.path), keys)}"


def _root(root: InstallRoot, environ: Mapping[str, str]) -> Setting:
    if root.chosen_by is None:
        return Setting(ROOT_KEY, str(root.path), "llmb", "default")
    if root.chosen_by in environ:
        return Setting(ROOT_KEY, str(root.path), "shell", root.chosen_by)
    is_site = root.chosen_by == CLUSTER_CONFIG
    place = "the nearest folder with a cluster_config.yaml" if is_site else root.chosen_by
    return Setting(ROOT_KEY, str(root.path), "cluster" if is_site else "user", place)


def _variables(
    catalogue: Catalogue,
    config: ClusterConfig,
    written: Mapping[str, Setting],
    environ: Mapping[str, str],
    workload: str | None,
    jobs: tuple[str, JobDefaults] | None,
) -> Iterator[Setting]:
    """Yield the workers' variables: files override the shell, which overrides the catalogue."""
    shipped: dict[str, Setting] = {}
    if config.fabric:
        fabric = find_fabric(catalogue, config.fabric)
        place = f"fabric {fabric.fabric}: {fabric.source}"
        shipped |= {name: Setting(name, value, CATALOGUE, place) for name, value in fabric.variables.items()}
    if jobs:
        size, defaults = jobs
        for one in defaults.variables:
            shipped[one.name] = Setting(one.name, one.value, CATALOGUE, f"recipe {size}: {one.source}")
    entries = dict(shipped)
    shells = {name: environ[name] for name in shipped if name in environ and not holds_secret(name, environ[name])}
    entries |= {name: Setting(name, value, "shell", name) for name, value in shells.items()}
    for name in config.environment:
        entries[name] = replace(written[f"environment.{name}"], key=name)
    if workload:
        for name in config.environment_of(workload):
            entries[name] = replace(written[f"workloads.{workload}.environment.{name}"], key=name)
    yield from entries.values()


def _jobs_of(catalogue: Catalogue, workload: str, size: str | None, gpu_type: str | None) -> tuple[str, JobDefaults]:
    sizes = sizes_of(find_workload(catalogue, workload))
    chosen = size or next(name for name in sizes if is_tiny(name) == (gpu_type == CPU))
    recipe = resolve(catalogue, Request(workload=workload, size=chosen, gpu_type=gpu_type))
    return chosen, job_defaults(catalogue, recipe)


def _without_secret(setting: Setting) -> Setting:
    is_secret = holds_secret(setting.key.rpartition(".")[2], str(setting.value))
    return replace(setting, value=HIDDEN) if is_secret else setting

# SPDX-License-Identifier: Apache-2.0
"""Where jobs run: a cluster's settings, its network, and the shell of whoever submits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from llmb.catalogue.job_defaults import find_fabric
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Fabric
from llmb.catalogue.resolve import CPU
from llmb.errors import did_you_mean, unknown
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.site.cluster_config import ClusterConfig, combined, read_cluster_file, read_user_file
from llmb.site.settings_keys import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``shell`` holds the variables of the shell that submits."""

    install: Path
    config: ClusterConfig = field(default_factory=ClusterConfig)
    fabric: Fabric | None = None
    shell: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the user has to know of the settings."""


SUITE_FOLDER = "llmb_repo"
"""Where the reference suite's installer leaves its recipes, below the root of installation."""


SUITES = "suites"
"""What ``llmb install`` makes of the suite's releases, below the root of installation."""


def suite_checkout(site: Site, tag: str | None) -> Path:
    """The checkout of the reference suite: that of the settings, of ``tag`` in the installation, or of its own
    installer."""
    if chosen := site.config.reference_suite.checkout:
        return Path(chosen).expanduser()
    installed = site.install / SUITES / tag if tag else None
    return installed if installed and installed.is_dir() else site.install / SUITE_FOLDER


def read_site(
    catalogue: Catalogue,
    install: Path,
    environ: Mapping[str, str],
    schema: type[ClusterConfig],
    user_schema: type[BaseModel],
) -> Site:
    """Raises UsageError with all that is wrong with the settings below ``install``, or with the user's."""
    file = read_cluster_file(install / CLUSTER_CONFIG, schema)
    config = combined(file, read_user_file(environ, user_schema), schema)
    fabric = find_fabric(catalogue, config.fabric) if config.fabric else None
    if file.form is None:  # the reference suite has GPU types and workloads that llmb lacks
        _check_gpu_types(catalogue, config)
    notes = file.notes if file.form else (*file.notes, *_unknown_workloads(catalogue, config))
    return Site(install=install, config=config, fabric=fabric, shell=environ, notes=notes)


def _check_gpu_types(catalogue: Catalogue, config: ClusterConfig) -> None:
    """A partition of a misspelled type would silently get no jobs. Raises UsageError."""
    known = (*catalogue.gpus, CPU)
    for keys, value in leaves(config):
        if keys[-1] == "gpu_type" and "environment" not in keys and value not in known:
            raise unknown("GPU type", value, known, do=f"see '{'.'.join(keys)}' in 'llmb config show'")


def _unknown_workloads(catalogue: Catalogue, config: ClusterConfig) -> Iterator[str]:
    for name in config.workloads:
        if name not in catalogue.workloads:
            near = did_you_mean(name, catalogue.workloads)
            yield f"warning: {CLUSTER_CONFIG}: workloads.{name}: there is no such workload{near}"

# SPDX-License-Identifier: Apache-2.0
"""Where jobs run: a cluster's settings, its network, and the shell of whoever submits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from llmb.catalogue.fabric import Fabric
from llmb.catalogue.job_defaults import find_fabric
from llmb.catalogue.load import Catalogue
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.site.cluster_config import ClusterConfig, combined, read_cluster_file, read_user_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``shell`` holds the variables of the shell that submits."""

    install: Path
    config: ClusterConfig = field(default_factory=ClusterConfig)
    fabric: Fabric | None = None
    shell: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the user has to know of the settings."""


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
    return Site(install=install, config=config, fabric=fabric, shell=environ, notes=file.notes)

# SPDX-License-Identifier: Apache-2.0
"""Where jobs run: a cluster's settings, its network, and the shell of whoever submits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmb.catalogue.fabric import Fabric
from llmb.catalogue.job_defaults import find_fabric
from llmb.catalogue.load import Catalogue
from llmb.site.cluster_config import ClusterConfig, read_cluster_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """``shell`` holds the variables of the shell that submits."""

    install: Path
    config: ClusterConfig = field(default_factory=ClusterConfig)
    fabric: Fabric | None = None
    shell: Mapping[str, str] = field(default_factory=dict)


def read_site(
    catalogue: Catalogue, install: Path, environ: Mapping[str, str], schema: type[ClusterConfig] = ClusterConfig
) -> Site:
    """Raises UsageError with all that is wrong with the settings below ``install``."""
    config = read_cluster_config(install, schema)
    fabric = find_fabric(catalogue, config.fabric) if config.fabric else None
    return Site(install=install, config=config, fabric=fabric, shell=environ)

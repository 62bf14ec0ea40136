# SPDX-License-Identifier: Apache-2.0
"""Settings of this node, read now."""

from collections.abc import Mapping
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.health.checks.nvidia_smi import read_states
from llmb.health.facts import FactSource
from llmb.missing import Missing
from llmb.resources.host import host_name
from llmb.resources.settings import NodeSettings, read_settings
from llmb.runs.conditions import gpu_limits
from llmb.schedulers.lookup import read_cluster_site


def settings_here(install: Path, environ: Mapping[str, str], source: FactSource | None = None) -> NodeSettings:
    """Settings of this node, with those of its GPUs, and the image that jobs train in. Raises UsageError for settings
    of the cluster that are wrong.
    """
    source = source or FactSource(environ=environ)
    found = read_settings(source, environ)
    states, _ = read_states(source, host_name())
    site = read_cluster_site(Catalogue(), install, environ)
    container = site.config.container
    image = {"software.image": container.image} if container.image and container.runtime != "none" else {}
    limits = {} if isinstance(states, Missing) else gpu_limits(states.gpus)
    missing = {"hardware": states.reason} if isinstance(states, Missing) else {}
    return NodeSettings(values={**found.values, **limits, **image}, missing={**found.missing, **missing})

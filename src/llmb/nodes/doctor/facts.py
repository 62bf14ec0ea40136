# SPDX-License-Identifier: Apache-2.0
"""The expectations for a node, and the sources of facts for its checks: system files and the output of programs."""

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmb.base.errors import unknown
from llmb.base.input_files import SystemFiles
from llmb.base.tools import Output, ask_program
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Gpu
from llmb.catalogue.resolve import CPU
from llmb.launch.scheduler_lookup import SCHEDULERS, scheduler_of
from llmb.launch.site.site import Site
from llmb.readers.samples.host import usable_cores
from llmb.runs.folder import CLUSTER_CONFIG

OF_CLUSTERS = frozenset((*SCHEDULERS, "scheduler", "cluster_name", "fabric"))
"""Settings that only clusters have; 'llmb install' also writes a settings file for a single machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """The expected properties of a node; None if unknown. ``gpu_type_by`` and ``gpus_by`` are the sources of the
    expected GPU type and number of GPUs."""

    catalogue: Mapping[str, Gpu] = field(default_factory=dict)
    gpu: Gpu | None = None
    gpu_type_by: str | None = None
    gpus: int | None = None
    gpus_by: str | None = None
    fabric: str | None = None
    runtime: str = "none"
    """The container runtime of jobs."""
    cluster: bool = False
    """True if the node is part of a cluster, where nodes share folders."""
    python: str | None = None
    """The interpreter on the nodes; None for the one that runs llmb."""

    @property
    def needs_gpus(self) -> bool:
        return bool(self.gpus)


def target_of(catalogue: Catalogue, site: Site, gpu_type: str | None = None, gpus: int | None = None) -> TargetFacts:
    """Return the expectations from the command's ``gpu_type`` and ``gpus``, or else from settings. Raises UsageError if
    the GPU type is unknown or not in the partition, or if the partition has several types and none is specified."""
    config, scheduler = site.config, scheduler_of(site)
    check_gpu_type(catalogue, gpu_type)
    chosen = scheduler.defaults(site, scheduler.options_here(site.shell), gpu_type and gpu_type.lower())
    name = chosen.gpu_type or config.gpu_type
    check_gpu_type(catalogue, name)
    gpu = catalogue.gpus.get(name.lower()) if name else None
    name_by = "--gpu-type" if gpu_type else CLUSTER_CONFIG if name else None
    count, count_by = gpus, "--gpus"
    if count is None and name and not gpu:
        count, count_by = 0, str(name_by)
    if count is None:
        count, count_by = chosen.gpus_per_node, CLUSTER_CONFIG
    if count is None and gpu:
        count, count_by = gpu.gpus_per_node, f"nodes of {gpu.gpu_type}"
    return TargetFacts(
        catalogue=catalogue.gpus,
        gpu=gpu,
        gpu_type_by=name_by,
        gpus=count,
        gpus_by=None if count is None else count_by,
        fabric=config.fabric,
        runtime=config.container.runtime,
        cluster=not OF_CLUSTERS.isdisjoint(config.model_fields_set),
        python=config.python,
    )


def check_gpu_type(catalogue: Catalogue, name: str | None) -> None:
    """Raise UsageError if ``name`` is not a GPU type of the catalogue or ``cpu``."""
    if name and name.lower() not in (*catalogue.gpus, CPU):
        raise unknown("GPU type", name, (*catalogue.gpus, CPU))


def run_places(site: Site, environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the absolute paths of the folders that runs use, by purpose."""
    checkpoints = environ.get("CHECKPOINT_DIR")
    places = {
        "install": site.install,
        "images": _images(site),
        "checkpoints": Path(checkpoints) if checkpoints else site.install / "workloads",
        "temp": Path(environ.get("TMPDIR") or "/tmp"),  # noqa: S108 (the default of programs for temporary files)
    }
    return {name: path.absolute() for name, path in places.items()}


def _images(site: Site) -> Path:
    image = site.config.container.image
    if image and image.startswith("/"):
        return Path(image).parent
    return site.install / (site.config.install.image_folder or "images")


Ask = Callable[[Sequence[str], float], Output]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource(SystemFiles):
    """The sources of facts about a node, which tests replace with recorded files and answers."""

    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: Callable[[], int] = usable_cores
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    """Returns the soft and the hard limit of this process for a resource."""
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs


def printed_documents(text: str) -> dict[str, Any]:
    """Merge the JSON objects, one per line, that a probe printed; ignore other lines, such as from Python's startup."""
    documents: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        documents.update(document if isinstance(document, dict) else {})
    return documents

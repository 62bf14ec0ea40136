# SPDX-License-Identifier: Apache-2.0
"""The expectations of a node, and the sources of its checks: files below a root folder, and the output of programs."""

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
"""Settings that a single machine lacks, although 'llmb install' also writes its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """The expectations for a node; None if unknown. ``gpus_by`` and ``gpu_type_by`` name their sources."""

    catalogue: Mapping[str, Gpu] = field(default_factory=dict)
    gpu: Gpu | None = None
    gpu_type_by: str | None = None
    gpus: int | None = None
    gpus_by: str | None = None
    fabric: str | None = None
    runtime: str = "none"
    """Runtime of containers."""
    cluster: bool = False
    """True if several nodes read the same folders."""
    python: str | None = None
    """The interpreter of the nodes; None for the one that runs llmb."""

    @property
    def needs_gpus(self) -> bool:
        return bool(self.gpus)


def target_of(catalogue: Catalogue, site: Site, gpu_type: str | None = None, gpus: int | None = None) -> TargetFacts:
    """Return the target; ``gpu_type`` and ``gpus`` come from the command. Raises UsageError for an unknown GPU type,
    or that the partition of this job does not have."""
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
    """Raise UsageError for an unknown type."""
    if name and name.lower() not in (*catalogue.gpus, CPU):
        raise unknown("GPU type", name, (*catalogue.gpus, CPU))


def run_places(site: Site, environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders to which runs write, by purpose."""
    checkpoints = environ.get("CHECKPOINT_DIR")
    places = {
        "install": site.install,
        "images": _images(site),
        "checkpoints": Path(checkpoints) if checkpoints else site.install / "workloads",
        "temp": Path(environ.get("TMPDIR") or "/tmp"),  # noqa: S108 (where programs put what is temporary)
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
    """A node; in tests, a recorded tree of files, and recorded answers of programs and of the kernel."""

    ask: Ask = ask_program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: Callable[[], int] = usable_cores
    rlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
    """Soft and hard limit of this process."""
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs


def printed_documents(text: str) -> dict[str, Any]:
    """Parse a probe's output, an object per line, up to its failure; start-up files of Python may print, too."""
    documents: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        documents.update(document if isinstance(document, dict) else {})
    return documents

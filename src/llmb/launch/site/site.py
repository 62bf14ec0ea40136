# SPDX-License-Identifier: Apache-2.0
"""Describes where jobs run: a cluster's settings, network and submitting shell, and the GPUs of this machine."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from llmb.base.errors import EnvironmentProblem, UsageError, did_you_mean
from llmb.base.tools import ask_program
from llmb.catalogue.catalogue import Catalogue, find_fabric
from llmb.catalogue.records import Fabric
from llmb.catalogue.resolve import CPU
from llmb.launch.site.cluster_config import ClusterConfig, combined, leaves, read_cluster_file, read_user_file
from llmb.readers.samples.host import usable_cores
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.runs.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where jobs run: its install root, settings and network, and the variables of the submitting shell."""

    install: Path
    config: ClusterConfig = field(default_factory=ClusterConfig)
    fabric: Fabric | None = None
    shell: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes for the user on the settings."""


SUITE_FOLDER = "llmb_repo"
"""Name of the folder in the install root in which the reference suite's own installer clones the suite."""


SUITES = "suites"
"""Name of the folder in the install root in which ``llmb install`` clones releases of the suite."""


def suite_checkout(site: Site, tag: str | None) -> Path:
    """Return the path of the reference suite's checkout, from the settings, from ``llmb install`` for ``tag``, or from
    the suite's own installer."""
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
    """Read the site from the settings below ``install`` and the user's; raise UsageError if they are invalid."""
    file = read_cluster_file(install / CLUSTER_CONFIG, schema)
    config = combined(file, read_user_file(environ, user_schema), schema)
    fabric = find_fabric(catalogue, config.fabric) if config.fabric else None
    if file.form is None:  # the reference suite has GPU types and workloads that llmb lacks
        _check_gpu_types(catalogue, config)
    notes = file.notes if file.form else (*file.notes, *_unknown_workloads(catalogue, config))
    return Site(install=install, config=config, fabric=fabric, shell=environ, notes=notes)


def _check_gpu_types(catalogue: Catalogue, config: ClusterConfig) -> None:
    """Raise UsageError for an unknown GPU type, because a partition with a misspelled type would receive no jobs."""
    types = (*catalogue.gpus, CPU)
    for keys, value in leaves(config):
        if keys[-1] == "gpu_type" and "environment" not in keys and value not in types:
            do = f"run 'llmb config set {'.'.join(keys)} TYPE', with --user if the value is in your own defaults"
            raise UsageError(f"unknown GPU type '{value}'{did_you_mean(value, types)}", choices=types, do=do)


def _unknown_workloads(catalogue: Catalogue, config: ClusterConfig) -> Iterator[str]:
    for name in config.workloads:
        if name not in catalogue.workloads:
            near = did_you_mean(name, catalogue.workloads)
            yield f"warning: {CLUSTER_CONFIG}: workloads.{name}: there is no such workload{near}"


QUERY = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
QUERY_LIMIT_S = 30
MOST_GPUS = 1024
"""The maximum number of lines to read from nvidia-smi."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The names of this machine's visible GPUs, as the driver reports them, and the number of available CPU cores."""

    gpu_names: tuple[str, ...]
    cores: int


def this_machine() -> Machine:
    return Machine(gpu_names=_gpu_names(), cores=usable_cores())


def _gpu_names() -> tuple[str, ...]:
    if shutil.which(QUERY[0]) is None:
        return ()
    output = ask_program(QUERY, QUERY_LIMIT_S)
    if output.problem:
        return ()
    names = tuple(line.strip() for line in output.text.splitlines() if line.strip())[:MOST_GPUS]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else visible_names(names, visible)


def visible_names(names: Sequence[str], visible: str) -> tuple[str, ...]:
    """Return the names that CUDA_VISIBLE_DEVICES selects; like CUDA, stop at the first invalid index, such as -1.

    The UUIDs of the GPUs in ``names`` are unknown, so a UUID selects the name at its own position in ``visible``.
    """
    reasons: list[str] = []
    for device in visible.split(","):
        number = int(device) if device.strip().isdecimal() else len(reasons)
        if not device.strip() or device.strip().startswith("-") or number >= len(names):
            break
        reasons.append(names[number])
    return tuple(reasons)


def check_machine(plan: Plan, machine: Machine) -> None:
    """Raise EnvironmentProblem if this machine has too few GPUs for ``plan``."""
    recipe, gpus = plan.recipe, len(machine.gpu_names)
    if plan.device == "cuda" and plan.processes > gpus:
        small = "pass '" if recipe.config_file else "run 'llmb run pretrain_llama3.1 tiny "
        needed = "1 visible GPU" if plan.processes == 1 else f"{plan.processes} visible GPUs"
        fewer = f"pass a --scale of at most {gpus} that the recipe has, " if gpus else ""
        raise EnvironmentProblem(
            f"{recipe.workload} {recipe.size} at this scale requires {needed}, but this machine has {gpus or 'none'}",
            do=f"{fewer}{small}--gpu-type cpu' to train on the CPU, or pass --dry-run to show the plan",
        )

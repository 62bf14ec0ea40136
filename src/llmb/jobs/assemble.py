# SPDX-License-Identifier: Apache-2.0
"""What the cluster's settings and the user's options give each job, whatever it does. Pure."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from llmb.catalogue.job_defaults import JobDefaults
from llmb.catalogue.records import Fabric
from llmb.errors import UsageError
from llmb.jobspec.node_setup import Binding, Boost, ContainerSettings
from llmb.jobspec.options import JobOptions
from llmb.jobspec.spec import JobSpec, Placement
from llmb.jobspec.variables import Variable, VariableLayer, layered
from llmb.programs.port import ProgramWork
from llmb.runs.folder import CLUSTER_CONFIG
from llmb.schedulers.lookup import find_scheduler
from llmb.site.cluster_config import ClusterConfig
from llmb.site.site import Site


def on_site(
    spec: JobSpec,
    site: Site,
    options: JobOptions,
    run: tuple[ProgramWork, JobDefaults] | None = None,
    *,
    workload: str = "",
    own: Mapping[str, str] = MappingProxyType({}),
    measured: bool = True,
) -> JobSpec:
    """``spec`` with what the cluster's settings and the user's options give each job, and the scheduler's flags.

    A job that is ``measured`` also gets what decides its speed: the variables of the network, the GPUs' boost and
    bindings. Nothing replaces the variables that are a job's ``own``. Raises UsageError if it is not possible.
    """
    config = site.config
    fabric = site.fabric if measured and spec.gpus else None
    work, defaults = run or (None, None)
    shipped = [work.variables] if work else []
    if fabric:
        shipped.append(VariableLayer(f"fabric {fabric.fabric}", fabric.variables))
    if work and defaults and work.recipe_variables:
        shipped.append(VariableLayer("recipe", {item.name: item.value for item in defaults.variables}))
    given = [
        VariableLayer(CLUSTER_CONFIG, config.environment),
        VariableLayer(f"{CLUSTER_CONFIG}, workload", config.environment_of(workload)),
        VariableLayer("--env", options.variables),
        VariableLayer("llmb", own),
    ]
    variables = layered(shipped, site.shell, given)
    if fabric:
        _check_network(fabric, site, variables)
    added: dict[str, object] = {
        "variables": variables,
        "modules": config.modules,
        "profiles": (*([fabric.profile] if fabric and fabric.profile else []), *config.profiles),
        "prolog": config.prolog,
        "python": config.python or spec.python,
    }
    if measured:
        level = defaults.vboost if defaults else None
        added["binding"] = binding(options, config)
        added["vboost"] = boost(options, config, spec.placement, level) if spec.gpus else None
    return find_scheduler(spec.scheduler).completed(spec.model_copy(update=added), options, site)


def boost(
    options: JobOptions, config: ClusterConfig, placement: Placement, of_recipe: int | None = None
) -> Boost | None:
    """None for no boost. The cluster's is for full nodes alone: the other GPUs of a node are of other jobs.

    What the published jobs asked for is tried, as they did. Raises UsageError where an option asks for a boost on a
    part of a node.
    """
    if options.vboost and not placement.whole_nodes:
        do = "leave --vboost out, or take all GPUs of the node"
        raise UsageError("vboost is for all GPUs of a node, and this job uses a part of one", do=do)
    level = options.vboost if options.vboost is not None else config.vboost if placement.whole_nodes else None
    if level == "recipe":
        return Boost(level=of_recipe, required=False) if of_recipe else None
    return Boost(level=level) if level else None


def binding(options: JobOptions, config: ClusterConfig) -> Binding:
    """What options ask for, each above the cluster's setting."""
    chosen = {"cpu": options.cpu_binding, "numa": options.numa_binding}
    return config.binding.model_copy(update={name: value for name, value in chosen.items() if value is not None})


def _check_network(fabric: Fabric, site: Site, variables: Iterable[Variable]) -> None:
    """Raises UsageError if the network needs a variable that is not set."""
    known = {variable.name for variable in variables} | set(site.shell)
    missing = [name for name in fabric.needs if name not in known]
    if missing:
        what = f"the network {fabric.fabric} needs {', '.join(missing)}, which only this cluster knows"
        raise UsageError(what, do="set it under 'environment' in cluster_config.yaml")


def mounted_folders(container: ContainerSettings, folders: Iterable[str]) -> ContainerSettings:
    """Adds the folders that a job needs. Raises UsageError for a folder whose name cannot be mounted."""
    if container.runtime == "none":
        return container
    own = list(folders)
    odd = [path for path in own if "," in path or ":" in path]
    if odd:
        do = "give a folder whose name has no comma and no colon"
        raise UsageError(f"{container.runtime} cannot mount {', '.join(map(repr, odd))}", do=do)
    return container.model_copy(update={"mounts": tuple(dict.fromkeys([*container.mounts, *own]))})

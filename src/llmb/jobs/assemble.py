# SPDX-License-Identifier: Apache-2.0
"""Builds the specification of a job from a plan, the requested options and the site. Pure."""

from collections.abc import Iterable, Iterator

from llmb.catalogue.job_defaults import JobDefaults
from llmb.errors import UsageError
from llmb.jobspec.arguments import PYTHON, RUN_FOLDER
from llmb.jobspec.container import ContainerSettings
from llmb.jobspec.node_setup import Binding, Boost
from llmb.jobspec.options import FrameworkOptions, JobOptions
from llmb.jobspec.placement import Placement, place
from llmb.jobspec.spec import JobSpec
from llmb.jobspec.variables import Variable, VariableLayer, layered
from llmb.programs.port import Program, ProgramRequest, ProgramWork
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.schedulers.port import Scheduler
from llmb.site.cluster_config import ClusterConfig
from llmb.site.site import Site

BEGIN = (PYTHON, "-P", "-m", "llmb.jobs.begin", RUN_FOLDER)
FINISH = (PYTHON, "-P", "-m", "llmb.jobs.finish", RUN_FOLDER)


def assemble(
    plan: Plan,
    program: Program,
    choices: Choices,
    asked: FrameworkOptions,
    defaults: JobDefaults,
    options: JobOptions,
    site: Site,
    scheduler: Scheduler,
    folder: RunFolder,
) -> JobSpec:
    """The job that runs ``plan`` in ``folder``, which need not exist. Raises UsageError if it is not possible."""
    recipe, chosen, gpus = plan.recipe, scheduler.defaults(site, options, plan.recipe.gpu_type), plan.device == "cuda"
    given = options.gpus_per_node or chosen.gpus_per_node
    config = site.config
    own = (config.environment, config.environment_of(recipe.workload), options.variables)
    known = frozenset(name for names in (site.shell, *own) for name in names)
    work = program.work(plan, ProgramRequest(choices=choices, options=asked, site=site, variables=known), folder)
    placement = place(recipe.scale, given or defaults.gpus_per_node)
    spec = JobSpec(
        scheduler=scheduler.name,
        program=program.name,
        title=f"{recipe.title()}, by llmb{work.title}",
        name=folder.name,
        placement=placement,
        gpus=gpus,
        nvlink_domain_nodes=defaults.nvlink_domain_nodes,
        time_limit_min=defaults.time_limit_min,
        retries=chosen.retries if options.retries is None else options.retries,
        start=work.start or options.start or chosen.start,
        variables=job_variables(plan, work, defaults, options, site),
        gpu_type=recipe.gpu_type,
        modules=config.modules,
        profiles=(*([site.fabric.profile] if site.fabric and site.fabric.profile else []), *config.profiles),
        prolog=config.prolog,
        vboost=boost(options, config, placement, defaults.vboost) if gpus else None,
        binding=binding(options, config),
        python=config.python or options.python,
        container=mounted_folders(work.container, _own_mounts(plan, site)),
        control_in_container=work.control_in_container,
        begin=BEGIN,
        work=work.command,
        finish=FINISH,
        log=folder.log.name,
        documented_root=str(site.install) if site.shell.get("STAGE_PATH") else None,
    )
    return scheduler.completed(spec, options, site)


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
    asked = options.vboost if options.vboost is not None else config.vboost if placement.whole_nodes else None
    level = of_recipe if asked == "recipe" else asked
    return Boost(level=level, required=asked != "recipe") if level else None


def binding(options: JobOptions, config: ClusterConfig) -> Binding:
    """What options ask for, each above the cluster's setting."""
    chosen = {"cpu": options.cpu_binding, "numa": options.numa_binding}
    return config.binding.model_copy(update={name: value for name, value in chosen.items() if value is not None})


def job_variables(
    plan: Plan, work: ProgramWork, defaults: JobDefaults, options: JobOptions, site: Site
) -> tuple[Variable, ...]:
    """Raises UsageError if the network needs a variable that is not set."""
    config = site.config
    fabric = site.fabric if plan.device == "cuda" else None
    shipped = [work.variables]
    if fabric:
        shipped.append(VariableLayer(f"fabric {fabric.fabric}", fabric.variables))
    if work.recipe_variables:
        shipped.append(VariableLayer("recipe", {variable.name: variable.value for variable in defaults.variables}))
    given = [
        VariableLayer("cluster_config.yaml", config.environment),
        VariableLayer("cluster_config.yaml, workload", config.environment_of(plan.recipe.workload)),
        VariableLayer("--env", options.variables),
    ]
    variables = layered(shipped, site.shell, given)
    known = {variable.name for variable in variables} | set(site.shell)
    missing = [name for name in fabric.needs if name not in known] if fabric else []
    if fabric and missing:
        what = f"the network {fabric.fabric} needs {', '.join(missing)}, which only this cluster knows"
        raise UsageError(what, do="set it under 'environment' in cluster_config.yaml")
    return variables


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


def _own_mounts(plan: Plan, site: Site) -> Iterator[str]:
    yield str(site.install)
    if plan.checkpoint_dir:
        yield plan.checkpoint_dir
    for item in (plan.start, plan.weights, plan.dataset):
        if item:
            yield item.path

# SPDX-License-Identifier: Apache-2.0
"""The batch job of a framework: as the engine's, but for what its processes are and the container they are in. Pure."""

from dataclasses import dataclass, replace

from llmb.catalogue.records import JobDefaults
from llmb.errors import UsageError
from llmb.launch.cluster_config import ContainerSettings
from llmb.launch.frameworks.megatron_bridge import bridge_command, bridge_data, bridge_variables
from llmb.launch.frameworks.options import FrameworkOptions
from llmb.launch.site import Site
from llmb.launch.slurm.options import SlurmOptions
from llmb.launch.slurm.render import BEGIN, engine_job, mounts_of, placement_of
from llmb.launch.slurm.script import BatchJob
from llmb.launch.slurm.steps import FOLDER, single_step, worker_step
from llmb.launch.variables import Layer, layered
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan

FINISH = ("-m", "llmb.launch.frameworks.finish", FOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework instead of llmb's engine, and what the user says of it."""

    name: str
    choices: Choices
    options: FrameworkOptions


def framework_job(
    framework: Framework, plan: Plan, defaults: JobDefaults, options: SlurmOptions, site: Site, folder: RunFolder
) -> BatchJob:
    """Raises UsageError where the cluster has no containers.

    What begins and ends the job runs outside of the container, which has no llmb.
    """
    container = _container(framework, site)
    inside = replace(site, config=site.config.model_copy(update={"container": container}))
    options = replace(options, start="task-per-gpu")
    job = engine_job(plan, defaults, options, inside, folder)
    settings = site.config.slurm
    save_dir = str(folder.checkpoints_of(plan))
    command = bridge_command(plan, framework.choices, save_dir, framework.options.arguments)
    placement = placement_of(plan, defaults, options, settings)
    mounts = mounts_of(plan, inside)
    given = {item.name: item for item in job.variables if item.origin not in ("engine", "recipe")}
    shipped = [Layer(framework.name, bridge_variables(plan.recipe))]
    own = {item.name: item for item in layered(shipped, site.shell, ())}
    return replace(
        job,
        title=f"{job.title}, with {framework.name} {bridge_data().release}",
        variables=tuple({**own, **given}.values()),
        begin=single_step(ContainerSettings(), (), BEGIN),
        work=worker_step(
            "task-per-gpu", placement, command, container, mounts, gpu=True, srun_flags=settings.srun_flags
        ),
        finish=single_step(ContainerSettings(), (), FINISH),
    )


def _container(framework: Framework, site: Site) -> ContainerSettings:
    settings = site.config.container
    if settings.runtime == "none":
        do = "set 'container: {runtime: pyxis, image: ...}' (or apptainer) in cluster_config.yaml"
        raise UsageError(f"{framework.name} runs in its container, and this cluster has none", do=do)
    image = framework.options.image or bridge_data().images[settings.runtime]
    # The command begins with what binds each process to its cores.
    update = {"image": image, "mounts": (*settings.mounts, *framework.options.mounts), "python": "bash"}
    return settings.model_copy(update=update)

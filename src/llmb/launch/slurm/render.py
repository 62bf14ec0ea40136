# SPDX-License-Identifier: Apache-2.0
"""From a plan to its batch script. Pure: the same values give the same text."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from llmb.catalogue.records import JobDefaults
from llmb.errors import UsageError
from llmb.launch.cluster_config import SlurmSettings
from llmb.launch.profiled_worker import worker_module
from llmb.launch.site import Site
from llmb.launch.slurm.flags import Flags, asked, duration, flag_problems, on_top
from llmb.launch.slurm.options import SlurmOptions
from llmb.launch.slurm.placement import Placement, place, segment
from llmb.launch.slurm.script import BatchJob, batch_script
from llmb.launch.slurm.steps import ADDRESS, FOLDER, PORT, single_step, worker_step
from llmb.launch.slurm.words import Shell, Word
from llmb.launch.variables import Layer, Variable, layered
from llmb.launch.worker_variables import shipped_variables
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan

BEGIN = ("-m", "llmb.launch.slurm.begin", FOLDER)
FINISH = ("-m", "llmb.launch.slurm.finish", FOLDER)


def render(plan: Plan, defaults: JobDefaults, options: SlurmOptions, site: Site, folder: RunFolder) -> str:
    """The batch script that trains ``plan`` with the engine. Raises UsageError where it cannot be asked for."""
    return batch_script(engine_job(plan, defaults, options, site, folder))


def engine_job(plan: Plan, defaults: JobDefaults, options: SlurmOptions, site: Site, folder: RunFolder) -> BatchJob:
    """The same before it is text: another program than the engine's workers replaces ``work``."""
    recipe, settings, container = plan.recipe, site.config.slurm, site.config.container
    gpu = plan.device == "cuda"
    start = options.start or settings.start
    placement = placement_of(plan, defaults, options, settings)
    mounts = mounts_of(plan, site)
    step = worker_step(
        start,
        placement,
        ("-m", worker_module(plan), FOLDER),
        container,
        mounts,
        gpu=gpu,
        srun_flags=settings.srun_flags,
    )
    tasks = 1 if start == "torchrun" else placement.processes_per_node
    flags = job_flags_of(plan, defaults, options, settings, placement, tasks, folder)
    return BatchJob(
        title=f"{recipe.workload} {recipe.size} {recipe.dtype} on {recipe.scale} x {recipe.gpu_type}, by llmb",
        flags=flags,
        folder=run_folder_word(folder, flags),
        log=folder.log.name,
        modules=site.config.modules,
        profiles=(*([site.fabric.profile] if site.fabric and site.fabric.profile else []), *site.config.profiles),
        variables=job_variables(plan, defaults, options, site),
        processes_per_node=placement.processes_per_node,
        python=site.config.python or options.python,
        begin=single_step(container, mounts, BEGIN),
        work=step,
        finish=single_step(container, mounts, FINISH),
        shell_variables={"MASTER_ADDR": ADDRESS, "MASTER_PORT": PORT} if start == "task-per-gpu" else None,
    )


def placement_of(plan: Plan, defaults: JobDefaults, options: SlurmOptions, settings: SlurmSettings) -> Placement:
    given = options.gpus_per_node or settings.gpus_per_node
    return place(plan.recipe.scale, given or defaults.gpus_per_node)


def job_flags_of(
    plan: Plan,
    defaults: JobDefaults,
    options: SlurmOptions,
    settings: SlurmSettings,
    placement: Placement,
    tasks_per_node: int,
    folder: RunFolder,
) -> dict[str, str | None]:
    """All flags in the order of the script: what llmb decides, and its defaults below the site's and the user's."""
    retries = retries_of(options, settings)
    own = {"account": settings.account, "partition": settings.partition}
    site = {**{name: value for name, value in own.items() if value}, **settings.flags}
    chosen = on_top(dict(_defaults(plan, defaults, placement, tasks_per_node, folder, retries)), site, options.flags)
    if chosen.get("dependency"):
        # Or a job whose dependency can never be satisfied waits for ever.
        chosen = on_top({"kill-on-invalid-dep": "yes"}, chosen)
    flags: Flags = {
        "nodes": str(placement.nodes),
        "ntasks-per-node": str(tasks_per_node),
        **(_gpu_request(settings, placement) if plan.device == "cuda" else {}),
        **asked(chosen),
        **_files(folder, array=bool(chosen.get("array"))),
    }
    problems = list(flag_problems(asked(chosen)))
    if problems:
        raise UsageError("this job cannot be asked for:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return dict(flags)


def retries_of(options: SlurmOptions, settings: SlurmSettings) -> int:
    return settings.retries if options.retries is None else options.retries


def _defaults(
    plan: Plan, defaults: JobDefaults, placement: Placement, tasks_per_node: int, folder: RunFolder, retries: int
) -> Iterator[tuple[str, str | None]]:
    yield "job-name", folder.name
    yield "time", duration(defaults.time_limit_min)
    if plan.device == "cpu":
        yield "cpus-per-task", str(placement.processes_per_node // tasks_per_node)
    elif placement.whole_nodes:
        yield "exclusive", None
        yield "mem", "0"
        if defaults.nvlink_domain_nodes > 1:
            yield "segment", str(segment(placement.nodes, defaults.nvlink_domain_nodes))
    yield ("requeue" if retries else "no-requeue"), None


def _gpu_request(settings: SlurmSettings, placement: Placement) -> Flags:
    count = placement.processes_per_node
    if settings.gpu_request == "none":
        return {}
    kind = f"{settings.gres_type}:" if settings.gres_type else ""
    if settings.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{count}"}
    return {"gpus-per-node": f"{kind}{count}"}


def _files(folder: RunFolder, *, array: bool) -> Flags:
    """Where Slurm works and writes. In its patterns % is special, and a backslash ends all that."""
    base = folder.path.parent
    if "\\" in str(base) or not str(base).isprintable():
        do = "set LLMB_INSTALL to a folder whose name has no backslash and no control character"
        raise UsageError("Slurm cannot write into this folder", where=repr(str(base)), do=do)
    escaped = str(base).replace("%", "%%") + (".%a" if array else "")
    return {
        "output": f"{escaped}/{folder.name.replace('%', '%%')}/{folder.batch_output.name}",
        "open-mode": "append",
        "chdir": str(base.parent if array else folder.path),
    }


def run_folder_word(folder: RunFolder, flags: Flags) -> Word:
    """The run folder, or in an array that of the task: each has one of its own, beside the others."""
    if not flags.get("array"):
        return str(folder.path)
    base = shlex.quote(str(folder.path.parent))
    return Shell(f'{base}."$SLURM_ARRAY_TASK_ID"/{shlex.quote(folder.name)}')


def job_variables(plan: Plan, defaults: JobDefaults, options: SlurmOptions, site: Site) -> tuple[Variable, ...]:
    """Raises UsageError where the network needs a variable that nobody has set."""
    config, workload = site.config, plan.recipe.workload
    own = (config.environment, config.environment_of(workload), options.variables)
    shipped = [
        Layer("engine", shipped_variables(plan.device, {name for names in (site.shell, *own) for name in names}))
    ]
    if plan.device == "cuda" and site.fabric:
        shipped.append(Layer(f"fabric {site.fabric.fabric}", site.fabric.variables))
    shipped.append(Layer("recipe", {variable.name: variable.value for variable in defaults.variables}))
    origins = ("cluster_config.yaml", "cluster_config.yaml, workload", "--env")
    given = [Layer(origin, variables) for origin, variables in zip(origins, own, strict=True)]
    variables = layered(shipped, site.shell, given)
    if plan.device == "cuda" and site.fabric:
        known = {variable.name for variable in variables} | set(site.shell)
        missing = [name for name in site.fabric.needs if name not in known]
        if missing:
            what = f"the network {site.fabric.fabric} needs {', '.join(missing)}, which only this cluster knows"
            raise UsageError(what, do="set it under 'environment' in cluster_config.yaml")
    return variables


def mounts_of(plan: Plan, site: Site) -> tuple[str, ...]:
    """Of the container, if there is one. Raises UsageError for a folder that cannot be mounted by its name."""
    container, own = site.config.container, list(_own_mounts(plan, site.install))
    if container.runtime == "none":
        return ()
    odd = [path for path in own if "," in path or ":" in path]
    if odd:
        do = "give a folder whose name has no comma and no colon"
        raise UsageError(f"{container.runtime} cannot mount {', '.join(map(repr, odd))}", do=do)
    return tuple(dict.fromkeys([*container.mounts, *own]))


def _own_mounts(plan: Plan, install: Path) -> Iterator[str]:
    yield str(install)
    if plan.checkpoint_dir:
        yield plan.checkpoint_dir
    if plan.start:
        yield plan.start.path

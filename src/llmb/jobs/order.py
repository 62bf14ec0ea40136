# SPDX-License-Identifier: Apache-2.0
"""Turns requests into jobs: applies settings and options, checks the run, and writes its folder."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.catalogue import Catalogue, JobDefaults, job_defaults
from llmb.catalogue.records import Fabric
from llmb.catalogue.resolve import Request, requested_gpu_type, resolve
from llmb.jobs.job import row_of_record
from llmb.launch.jobspec.job_options import Binding, Boost, ContainerSettings, FrameworkOptions, JobOptions
from llmb.launch.jobspec.spec import (
    PYTHON,
    RUN_FOLDER,
    JobSpec,
    Placement,
    Variable,
    VariableLayer,
    layered,
    place,
    write_spec,
)
from llmb.launch.programs.port import ProgramRequest, ProgramWork, find_program
from llmb.launch.scheduler_lookup import find_scheduler, scheduler_of
from llmb.launch.scheduler_port import Defaults, Scheduler, Submission
from llmb.launch.site.cluster_config import ClusterConfig
from llmb.launch.site.site import Site
from llmb.runs.checkpoint_use import check_space
from llmb.runs.choices import Choices
from llmb.runs.experiment import create_run_folder, experiment_name, release_checkpoints, run_parent
from llmb.runs.folder import CLUSTER_CONFIG, RunFolder, write_atomically, writing
from llmb.runs.plan import Plan
from llmb.runs.planning import NotPrepared
from llmb.runs.record import ENGINE, SubmittedJob, queued_record, write_record


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
    """Add the cluster's settings, the user's options and the scheduler's flags to ``spec``.

    A ``measured`` job also uses the network's variables, the GPU boost and CPU bindings, which affect its speed. The
    job's ``own`` variables take precedence over all others. Raise UsageError if the job is not possible.
    """
    config = site.config
    fabric = site.fabric if measured and spec.gpus else None
    work, defaults = run or (None, None)
    shipped = [work.variables] if work else []
    if fabric:
        shipped.append(VariableLayer(f"fabric {fabric.fabric}", fabric.variables))
    if work and defaults and work.recipe_variables:
        shipped.append(VariableLayer("recipe", {item.name: item.value for item in defaults.variables}))
    explicit = [
        VariableLayer(CLUSTER_CONFIG, config.environment),
        VariableLayer(f"{CLUSTER_CONFIG}, workload", config.environment_of(workload)),
        VariableLayer("--env", options.variables),
        VariableLayer("llmb", own),
    ]
    variables = layered(shipped, site.shell, explicit)
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
    """Return the GPU boost, if any. The cluster's setting applies only to full nodes, whose GPUs no other job shares.

    As in the published jobs, the recipe's boost need not succeed. Raise UsageError if an option requests a boost on
    part of a node.
    """
    if options.vboost and not placement.whole_nodes:
        do = "omit --vboost, or request all GPUs of the node"
        raise UsageError("vboost affects all GPUs of a node, but this job uses only some of them", do=do)
    level = options.vboost if options.vboost is not None else config.vboost if placement.whole_nodes else None
    if level == "recipe":
        return Boost(level=of_recipe, required=False) if of_recipe else None
    return Boost(level=level) if level else None


def binding(options: JobOptions, config: ClusterConfig) -> Binding:
    """Return the CPU and NUMA binding: the cluster's settings, overridden by the options."""
    chosen = {"cpu": options.cpu_binding, "numa": options.numa_binding}
    return config.binding.model_copy(update={name: value for name, value in chosen.items() if value is not None})


def _check_network(fabric: Fabric, site: Site, variables: Iterable[Variable]) -> None:
    names = {variable.name for variable in variables} | set(site.shell)
    missing = [name for name in fabric.needs if name not in names]
    if missing:
        what = f"the network {fabric.fabric} needs this cluster's values of {', '.join(missing)}"
        raise UsageError(what, do="set each under 'environment' in cluster_config.yaml")


def mounted_folders(container: ContainerSettings, folders: Iterable[str]) -> ContainerSettings:
    """Add mounts for the folders that a job needs if it uses a container; raise UsageError for a comma or colon."""
    if container.runtime == "none":
        return container
    names = list(folders)
    odd = [path for path in names if "," in path or ":" in path]
    if odd:
        do = "use a folder without commas and colons in its path"
        raise UsageError(f"{container.runtime} cannot mount {', '.join(map(repr, odd))}", do=do)
    return container.model_copy(update={"mounts": tuple(dict.fromkeys([*container.mounts, *names]))})


BEGIN = (PYTHON, "-P", "-m", "llmb.jobs.begin", RUN_FOLDER)
FINISH = (PYTHON, "-P", "-m", "llmb.jobs.finish", RUN_FOLDER)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that can be submitted."""

    spec: JobSpec
    folder: RunFolder
    row: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job's row in the history."""
    again: bool = False
    """True if the job was submitted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder(ABC):
    """A job that can be queued: everything except its folder is decided."""

    options: JobOptions
    site: Site

    @abstractmethod
    def place(self) -> tuple[Path, str]:
        """Return ``parent`` and ``name`` of the job's folder, ``parent/<name>_<seconds>/<name>``."""

    @abstractmethod
    def spec(self, folder: RunFolder) -> JobSpec:
        """Return the job's specification for a folder that need not exist; raise UsageError for an impossible job."""

    @abstractmethod
    def record(self, folder: RunFolder, spec: JobSpec) -> dict[str, Any]:
        """Write the files that only this kind of job has; return the fields of the job's row in the history."""

    @property
    def scheduler(self) -> Scheduler:
        return scheduler_of(self.site)

    def sample_folder(self) -> RunFolder:
        parent, name = self.place()
        return RunFolder(parent / f"{name}_SECONDS" / name)

    def sample(self) -> JobSpec:
        """Return the job's specification with a placeholder for the folder; raise UsageError for an impossible job."""
        return self.spec(self.sample_folder())

    def script(self) -> str:
        """Return the batch script with a placeholder for the folder; raise UsageError for an impossible job."""
        return self.scheduler.script(self.sample(), self.sample_folder())

    def write(self, folder: RunFolder) -> Prepared:
        """Write the job's files; raise UsageError if the job is not possible, EnvironmentProblem if writing fails."""
        spec = self.spec(folder)
        script = self.scheduler.script(spec, folder)
        with writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            row = self.record(folder, spec)
            write_spec(folder, spec)
            write_atomically(folder.batch_script, script)
        return Prepared(spec, folder, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(JobOrder):
    """A job that trains according to a plan."""

    plan: Plan
    defaults: JobDefaults
    program: str = ENGINE
    choices: Choices = field(default_factory=Choices)
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    missing: NotPrepared | None = None
    """The preparations that are missing before the job can be queued; only set for a dry run."""

    def place(self) -> tuple[Path, str]:
        experiment = experiment_name(self.plan, self.program, self.framework.arguments)
        return run_parent(self.site.install, self.plan, experiment), experiment

    def spec(self, folder: RunFolder) -> JobSpec:
        plan, defaults, options, site = self.plan, self.defaults, self.options, self.site
        recipe, program = plan.recipe, find_program(self.program)
        chosen = self.scheduler.defaults(site, options, recipe.gpu_type)
        placement = place(recipe.scale, options.gpus_per_node or chosen.gpus_per_node or defaults.gpus_per_node)
        work = program.work(plan, self._request(placement.processes_per_node), folder)
        spec = JobSpec(
            scheduler=self.scheduler.name,
            program=program.name,
            title=f"{recipe.title()}, by llmb{work.title}",
            name=folder.name,
            placement=placement,
            gpus=plan.device == "cuda",
            nvlink_domain_nodes=defaults.nvlink_domain_nodes,
            time_limit_min=defaults.time_limit_min,
            retries=chosen.retries if options.retries is None else options.retries,
            start=work.start or options.start or chosen.start,
            gpu_type=recipe.gpu_type,
            python=options.python,
            container=mounted_folders(work.container, _mounts(plan, site)),
            control_in_container=work.control_in_container,
            sampled=plan.device == "cuda" and not work.launch and program.name != ENGINE,
            begin=() if work.launch else BEGIN,
            work=work.command,
            launch=work.launch,
            finish=() if work.launch else FINISH,
            secrets=work.secrets,
            log=folder.log.name,
            documented_root=str(site.install) if site.shell.get("STAGE_PATH") else None,
        )
        if work.launch:  # the program's own script sets what llmb would take from the recipe and the network
            variables = work.variables.variables
            return on_site(spec, site, options, workload=recipe.workload, own=variables, measured=False)
        return on_site(spec, site, options, (work, defaults), workload=recipe.workload)

    def _request(self, gpus_per_node: int) -> ProgramRequest:
        config = self.site.config
        workload = config.environment_of(self.plan.recipe.workload)
        layers = (self.site.shell, config.environment, workload, self.options.variables)
        names = frozenset(name for layer in layers for name in layer)
        explicit = frozenset(name for layer in layers[1:] for name in layer)
        return ProgramRequest(
            choices=self.choices,
            options=self.framework,
            site=self.site,
            variables=names,
            gpus_per_node=gpus_per_node,
            explicit=explicit,
        )

    def record(self, folder: RunFolder, spec: JobSpec) -> dict[str, Any]:
        record = queued_record(
            self.plan,
            self.scheduler.handing_over(folder, spec),
            spec.retries,
            self.program,
            label=self.choices.label,
            image=spec.container.image,
            arguments=self.framework.arguments,
        )
        write_record(folder, record)
        return row_of_record(record)


def _mounts(plan: Plan, site: Site) -> Iterator[str]:
    yield str(site.install)
    if plan.checkpoint_dir:
        yield plan.checkpoint_dir
    yield from (item.path for item in (plan.start, plan.weights, plan.dataset) if item)


def make_order(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    options: JobOptions,
    site: Site,
    framework: FrameworkOptions | None = None,
    *,
    dry_run: bool = False,
) -> Order:
    """Make the order of a run, with all checks that do not need the cluster.

    Raise UsageError if a check fails, and NotPrepared, except for a ``dry_run``, if preparations are missing.
    """
    chosen = scheduler_of(site).defaults(site, options, request.gpu_type)
    on_site = replace(request, gpu_type=chosen.gpu_type)
    scaled = replace(on_site, scale=scale_of(catalogue, on_site, options, chosen))
    sources = {} if on_site.gpu_type == request.gpu_type else {"gpu_type": CLUSTER_CONFIG}
    recipe = resolve(catalogue, scaled, sources)
    chosen_framework = framework or FrameworkOptions()
    program = find_program(chosen_framework.framework or ENGINE)
    missing = None
    try:
        plan = program.plan(catalogue, recipe, choices, chosen_framework, site)
    except NotPrepared as error:
        if not dry_run:
            raise
        plan, missing = error.plan, error
    order = Order(
        plan=plan,
        defaults=job_defaults(catalogue, recipe),
        options=options,
        site=site,
        program=program.name,
        choices=choices,
        framework=chosen_framework,
        missing=missing,
    )
    order.script()
    return order


def scale_of(catalogue: Catalogue, request: Request, options: JobOptions, chosen: Defaults) -> int | None:
    """Return the requested scale, if any, or nodes x GPUs per node; raise UsageError if these differ, or if the number
    of GPUs per node is unknown."""
    if options.nodes is None:
        return request.scale
    gpu = catalogue.gpus.get(requested_gpu_type(catalogue, request))
    per_node = options.gpus_per_node or chosen.gpus_per_node or (gpu.gpus_per_node if gpu else None)
    if per_node is None:
        raise UsageError("the number of processes per node is not specified", do="pass --gpus-per-node")
    scale = options.nodes * per_node
    if request.scale not in (None, scale):
        what = f"--nodes {options.nodes} x {per_node} GPUs per node = {scale} GPUs, but the scale is {request.scale}"
        raise UsageError(what, do="pass either --nodes or --scale")
    return scale


def prepare(order: Order) -> Prepared:
    """Write the run folder; raise UsageError for an impossible job, EnvironmentProblem if files cannot be written."""
    plan, (parent, experiment) = order.plan, order.place()
    check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else parent)
    folder = create_run_folder(order.site.install, plan, experiment)
    with removed_if_refused(folder, plan):
        return order.write(folder)


def send(prepared: Prepared, environ: Mapping[str, str], held: Sequence[int] = ()) -> SubmittedJob:
    """Submit the job. The scheduler's client programs inherit the file descriptors ``held``, and thus their locks.

    Raise UsageError or EnvironmentProblem if the job is rejected, InfrastructureError if the scheduler is unreachable.
    """
    spec, folder = prepared.spec, prepared.folder
    job = Submission(spec=spec, folder=folder, environ=environ, held=held, again=prepared.again)
    return find_scheduler(spec.scheduler).submit(job)


@contextmanager
def removed_if_refused(folder: RunFolder, plan: Plan | None = None) -> Iterator[None]:
    """Remove the folders of a job and its checkpoints if it is rejected with UsageError or EnvironmentProblem.

    The folders remain if the scheduler does not answer, because the job may have been queued.
    """
    try:
        yield
    except (UsageError, EnvironmentProblem):
        if plan:
            release_checkpoints(folder, plan)
        shutil.rmtree(folder.path.parent, ignore_errors=True)
        raise

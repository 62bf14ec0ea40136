# SPDX-License-Identifier: Apache-2.0
"""Turns a request into a submitted job: checks the plan, then writes the run folder."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmb.catalogue.job_defaults import JobDefaults, job_defaults
from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, gpu_type_of, resolve
from llmb.errors import EnvironmentProblem, UsageError
from llmb.jobs.assemble import assemble
from llmb.jobspec.options import FrameworkOptions, JobOptions
from llmb.jobspec.spec import JobSpec, write_spec
from llmb.programs.lookup import find_program
from llmb.runs.choices import Choices
from llmb.runs.claim import claim_checkpoints, create_run_folder, release_checkpoints
from llmb.runs.disk_space import check_space
from llmb.runs.folder import (
    CLUSTER_CONFIG,
    RunFolder,
    cannot_write,
    experiment_name,
    run_parent,
    write_atomically,
)
from llmb.runs.plan import Plan
from llmb.runs.planning import NotPrepared
from llmb.runs.record import ENGINE, SubmittedJob, new_run_id, now, queued_record, write_record
from llmb.schedulers.lookup import QUEUE, find_scheduler
from llmb.schedulers.port import Defaults, Scheduler
from llmb.site.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job that can be queued: everything is decided except its folder."""

    plan: Plan
    defaults: JobDefaults
    options: JobOptions
    site: Site
    program: str = ENGINE
    choices: Choices = field(default_factory=Choices)
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    missing: NotPrepared | None = None
    """What has to be prepared before the job can be queued; only for a dry run."""

    @property
    def scheduler(self) -> Scheduler:
        return find_scheduler(QUEUE)

    @property
    def experiment(self) -> str:
        return experiment_name(self.plan, self.program, self.framework.arguments)

    @property
    def parent(self) -> Path:
        """The folder of all runs of the experiment."""
        return run_parent(self.site.install, self.plan, self.experiment)

    def spec(self, folder: RunFolder) -> JobSpec:
        return assemble(
            self.plan,
            find_program(self.program),
            self.choices,
            self.framework,
            self.defaults,
            self.options,
            self.site,
            self.scheduler,
            folder,
        )

    def sample_folder(self) -> RunFolder:
        return RunFolder(self.parent / f"{self.experiment}_SECONDS" / self.experiment)

    def sample(self) -> JobSpec:
        """The job in a folder that need not exist. Raises UsageError if it cannot be requested."""
        return self.spec(self.sample_folder())

    def script(self) -> str:
        """Likewise, as text."""
        return self.scheduler.script(self.sample(), self.sample_folder())


@dataclass(frozen=True, slots=True)
class Queued:
    """One run that was submitted."""

    folder: RunFolder
    job: SubmittedJob


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
    """Checks everything that can be checked without the cluster.

    Raises UsageError, and NotPrepared unless it is a ``dry_run``.
    """
    chosen = find_scheduler(QUEUE).defaults(site, options, request.gpu_type)
    on_site = replace(request, gpu_type=chosen.gpu_type)
    asked_for = replace(on_site, scale=scale_of(catalogue, on_site, options, chosen))
    found = {} if on_site.gpu_type == request.gpu_type else {"gpu_type": CLUSTER_CONFIG}
    recipe = resolve(catalogue, asked_for, found)
    asked = framework or FrameworkOptions()
    program = find_program(asked.framework or ENGINE)
    missing = None
    try:
        plan = program.plan(catalogue, recipe, choices, asked, site.install)
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
        framework=asked,
        missing=missing,
    )
    order.script()
    return order


def scale_of(catalogue: Catalogue, request: Request, options: JobOptions, chosen: Defaults) -> int | None:
    """The requested scale, or that of the requested nodes. Raises UsageError if they differ."""
    if options.nodes is None:
        return request.scale
    gpu = catalogue.gpus.get(gpu_type_of(catalogue, request))
    per_node = options.gpus_per_node or chosen.gpus_per_node or (gpu.gpus_per_node if gpu else None)
    if per_node is None:
        raise UsageError("the number of processes per node is not specified", do="add --gpus-per-node")
    scale = options.nodes * per_node
    if request.scale not in (None, scale):
        what = f"{options.nodes} nodes with {per_node} GPUs each are {scale} GPUs, but the scale is {request.scale}"
        raise UsageError(what, do="give either the nodes or the scale")
    return scale


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose files are written, but which is not submitted yet. The folders of an array are by index."""

    spec: JobSpec
    base: RunFolder
    """Holds the script."""
    folders: Mapping[int | None, RunFolder]
    again: bool = False
    """It was submitted before."""


def prepare(order: Order) -> Prepared:
    """Writes everything that the job needs into its run folders. Raises UsageError, EnvironmentProblem."""
    plan = order.plan
    check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else order.parent)
    base = create_run_folder(order.site.install, plan, order.experiment)
    spec = order.spec(base)
    folders: dict[int | None, RunFolder] = {index: array_folder(base, index) for index in spec.array}
    prepared = Prepared(spec, base, folders or {None: base})
    with removed_if_refused(prepared, plan):
        try:
            _write(order, prepared)
        except OSError as error:
            raise cannot_write(base.path, error) from error
    return prepared


def send(prepared: Prepared, environ: Mapping[str, str], held: Sequence[int] = ()) -> list[Queued]:
    """Submits the job to its scheduler, whose programs inherit the descriptors ``held``, and thus the locks on them.

    Raises UsageError and EnvironmentProblem if it was rejected, InfrastructureError if the scheduler did not answer.
    """
    spec, base = prepared.spec, prepared.base
    submitted = find_scheduler(spec.scheduler).submit(spec, base, environ, held, again=prepared.again)
    return [
        Queued(
            folder,
            SubmittedJob(
                scheduler=spec.scheduler,
                job_id=submitted.ids[index],
                cluster=submitted.cluster,
                submitted_at=now(),
                array_index=index,
                base_dir=None if folder == base else str(base.path),
                process=submitted.process,
            ),
        )
        for index, folder in prepared.folders.items()
    ]


def write_job(run: Queued) -> None:
    """Writes the handle of a run to its folder. Raises EnvironmentProblem."""
    try:
        write_atomically(run.folder.job, run.job.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise cannot_write(run.folder.path, error) from error


@contextmanager
def removed_if_refused(prepared: Prepared, plan: Plan) -> Iterator[None]:
    """Removes the run folders of a job that is rejected.

    They are kept if the scheduler does not answer, since the job may be queued: its script identifies the run.
    """
    try:
        yield
    except (UsageError, EnvironmentProblem):
        _remove(prepared, plan)
        raise


def _remove(prepared: Prepared, plan: Plan) -> None:
    for folder in {prepared.base, *prepared.folders.values()}:
        release_checkpoints(folder, plan)
        shutil.rmtree(folder.path.parent, ignore_errors=True)


def _write(order: Order, prepared: Prepared) -> None:
    spec, base = prepared.spec, prepared.base
    record = queued_record(
        order.plan,
        order.scheduler.handing_over(base),
        spec.retries,
        order.program,
        label=order.choices.label,
        image=spec.container.image,
        arguments=order.framework.arguments,
    )
    for index, folder in prepared.folders.items():
        if folder != base:
            folder.path.mkdir(parents=True)
            claim_checkpoints(folder, order.plan)
        write_record(folder, record.model_copy(update={"run_id": new_run_id()}))
        write_spec(folder, spec.for_run(index))
    if base not in prepared.folders.values():
        release_checkpoints(base, order.plan)  # it holds the script of an array, and no run
    write_atomically(base.batch_script, order.scheduler.script(spec, base))


def array_folder(base: RunFolder, index: int) -> RunFolder:
    """The folder of one run of an array, next to the folder with its script."""
    above = base.path.parent
    return RunFolder(above.with_name(f"{above.name}.{index}") / base.name)

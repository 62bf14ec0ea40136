# SPDX-License-Identifier: Apache-2.0
"""From a request to a queued job: the plan is checked, the run folder written, the script queued."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.catalogue.job_defaults import job_defaults
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import JobDefaults
from llmb.catalogue.resolve import CPU, Request, resolve
from llmb.errors import EnvironmentProblem, UsageError
from llmb.launch.frameworks.job import Framework, framework_job
from llmb.launch.frameworks.megatron_bridge import bridge_plan
from llmb.launch.frameworks.options import FrameworkOptions
from llmb.launch.site import Site
from llmb.launch.slurm.client import submit
from llmb.launch.slurm.options import SlurmOptions, array_indices
from llmb.launch.slurm.render import engine_job, retries_of
from llmb.launch.slurm.script import BatchJob, batch_script
from llmb.runs.checkpoint import read_checkpoint
from llmb.runs.choices import Choices
from llmb.runs.disk_space import check_space
from llmb.runs.folder import (
    RunFolder,
    cannot_write,
    create_run_folder,
    experiment_name,
    run_parent,
    write_atomically,
)
from llmb.runs.plan import Plan, make_plan
from llmb.runs.record import SubmittedJob, now, queued_record, write_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job that can be queued: everything is decided but its folder."""

    plan: Plan
    defaults: JobDefaults
    options: SlurmOptions
    site: Site
    framework: Framework | None = None
    """Null for llmb's engine."""

    def job(self, folder: RunFolder) -> BatchJob:
        if self.framework:
            return framework_job(self.framework, self.plan, self.defaults, self.options, self.site, folder)
        return engine_job(self.plan, self.defaults, self.options, self.site, folder)

    def sample(self) -> BatchJob:
        """The job in a folder that need not exist. Raises UsageError where it cannot be asked for."""
        name = experiment_name(self.plan)
        return self.job(RunFolder(run_parent(self.site.install, self.plan) / f"{name}_SECONDS" / name))

    @property
    def retries(self) -> int:
        return retries_of(self.options, self.site.config.slurm)

    def indices(self) -> list[int]:
        """Of an array; empty for a single job."""
        spec = self.sample().flags.get("array")
        return array_indices(spec) if spec else []


@dataclass(frozen=True, slots=True)
class Queued:
    """One run that was submitted."""

    folder: RunFolder
    job: SubmittedJob


def make_order(
    catalogue: Catalogue,
    request: Request,
    choices: Choices,
    options: SlurmOptions,
    site: Site,
    framework: FrameworkOptions | None = None,
) -> Order:
    """Checks everything that can be checked without the cluster. Raises UsageError."""
    recipe = resolve(catalogue, replace(request, gpu_type=request.gpu_type or site.config.gpu_type))
    asked = framework or FrameworkOptions()
    if asked.framework:
        plan = bridge_plan(catalogue, recipe, choices)
        own = Framework(name=asked.framework, choices=choices, options=asked)
    else:
        checkpoint = read_checkpoint(Path(choices.load_checkpoint)) if choices.load_checkpoint else None
        plan = make_plan(recipe, choices, device="cpu" if recipe.gpu_type == CPU else "cuda", checkpoint=checkpoint)
        own, site = None, asked.engine_site(site)
    order = Order(plan=plan, defaults=job_defaults(catalogue, recipe), options=options, site=site, framework=own)
    order.indices()
    return order


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job whose files are all there; only Slurm does not know of it. Of an array, the run folders are by index."""

    base: RunFolder
    """Holds the batch script."""
    folders: Mapping[int | None, RunFolder]


def prepare(order: Order) -> Prepared:
    """Writes everything that the job needs into its run folders. Raises UsageError, EnvironmentProblem."""
    plan, indices = order.plan, order.indices()
    check_space(plan, Path(plan.checkpoint_dir) if plan.checkpoint_dir else run_parent(order.site.install, plan))
    base = create_run_folder(order.site.install, plan)
    folders: dict[int | None, RunFolder] = {index: array_folder(base, index) for index in indices}
    prepared = Prepared(base, folders or {None: base})
    with removed_if_refused(prepared):
        try:
            _write(order, base, prepared.folders)
        except OSError as error:
            raise cannot_write(base.path, error) from error
    return prepared


def send(
    prepared: Prepared, environ: Mapping[str, str], held: Sequence[int] = (), arguments: Sequence[str] = ()
) -> list[Queued]:
    """Hands the job to Slurm. sbatch inherits the descriptors ``held``, and thus the locks on them.

    Raises UsageError and EnvironmentProblem where the job was refused, InfrastructureError where Slurm did not answer.
    """
    job_id, cluster = submit(prepared.base.batch_script, environ, held, arguments)
    ids = {index: job_id if index is None else f"{job_id}_{index}" for index in prepared.folders}
    return [
        Queued(folder, SubmittedJob(job_id=ids[index], cluster=cluster, submitted_at=now()))
        for index, folder in prepared.folders.items()
    ]


def write_job(run: Queued) -> None:
    """Keeps the handle of a run in its folder. Raises EnvironmentProblem."""
    try:
        write_atomically(run.folder.job, run.job.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise cannot_write(run.folder.path, error) from error


@contextmanager
def removed_if_refused(prepared: Prepared) -> Iterator[None]:
    """Removes the run folders of a job that Slurm refuses.

    Where Slurm does not answer they stay, since the job may be queued: its batch script tells which run it is.
    """
    try:
        yield
    except (UsageError, EnvironmentProblem):
        _remove(prepared)
        raise


def _remove(prepared: Prepared) -> None:
    for folder in {prepared.base, *prepared.folders.values()}:
        shutil.rmtree(folder.path.parent, ignore_errors=True)


def _write(order: Order, base: RunFolder, folders: Mapping[int | None, RunFolder]) -> None:
    command = ("sbatch", "--parsable", str(base.batch_script))
    record = queued_record(order.plan, command, order.retries)
    for folder in folders.values():
        folder.path.mkdir(parents=True, exist_ok=True)
        write_record(folder, record)
    write_atomically(base.batch_script, batch_script(order.job(base)))


def array_folder(base: RunFolder, index: int) -> RunFolder:
    """The folder of one run of an array, beside that which holds its batch script."""
    above = base.path.parent
    return RunFolder(above.with_name(f"{above.name}.{index}") / base.name)

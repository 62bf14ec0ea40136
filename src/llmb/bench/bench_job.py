# SPDX-License-Identifier: Apache-2.0
"""Measurements of nodes as a job of the scheduler, in a folder of its own below the root of installation."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.bench.cases import Device
from llmb.bench.device_bench import DeviceChoice
from llmb.bench.records import MeasurementFile
from llmb.catalogue.fabric import Fabric
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.errors import InfrastructureError, RunFailed, UsageError, UserInterrupt
from llmb.jobs.assemble import binding, boost, mounted_folders
from llmb.jobspec.arguments import PYTHON, RUN_FOLDER
from llmb.jobspec.options import JobOptions, StartMode
from llmb.jobspec.placement import Placement
from llmb.jobspec.spec import JobSpec, write_spec
from llmb.jobspec.variables import Variable, VariableLayer, layered
from llmb.processes.signals import Interrupted, signals_as_exceptions
from llmb.runs.claim import stamped_folder
from llmb.runs.folder import RunFolder, cannot_write, write_atomically
from llmb.schedulers.lookup import QUEUE, find_scheduler
from llmb.schedulers.port import AskedJob, JobState, Scheduler
from llmb.site.site import Site
from llmb.trust import STATE_FOLDER

PROGRAM = "bench"
FOLDER = Path(STATE_FOLDER) / "bench_jobs"
FINISH = "llmb.bench.finish_bench"
TASK = "bench_task.json"
TIME_LIMIT_MIN = 30
ASK_EVERY_S, ASK_S, PATIENCE_S = 2.0, 30.0, 600.0
SETTLE_S = 10.0
"""How long the files of a job that has ended may take to show here."""
Kind = Literal["collectives", "gpus"]


class BenchTask(Record):
    """What the end of the job has to know; its content is ``bench_task.json``."""

    schema_version: Literal[1] = 1
    kind: Kind
    install: str
    command: tuple[str, ...]
    measured_at: str


class BenchEnd(Record):
    """What the end of the job wrote: ``bench_end.json``. ``kept`` are the files of the measurements."""

    schema_version: Literal[1] = 1
    measured: tuple[MeasurementFile, ...] = ()
    kept: tuple[str, ...] = ()
    problem: str | None = None
    missing_nodes: tuple[str, ...] = ()
    """Nodes of the job that reported nothing."""


END = "bench_end.json"


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the processes of a job run on; ``gpu_type`` is None for GPUs of an unknown type."""

    placement: Placement
    device: Device
    gpu_type: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """A job that can be queued. ``files`` are those that its program reads, by name."""

    task: BenchTask
    title: str
    files: Mapping[str, str]
    nodes: Nodes
    start: StartMode
    program: str
    options: JobOptions
    site: Site

    @property
    def scheduler(self) -> Scheduler:
        return find_scheduler(QUEUE)

    @property
    def name(self) -> str:
        return f"bench_{self.task.kind}"

    def spec(self, folder: RunFolder) -> JobSpec:
        """Raises UsageError if the job is not possible."""
        config, fabric, on_gpus = self.site.config, self._fabric, self.nodes.device == "cuda"
        spec = JobSpec(
            scheduler=self.scheduler.name,
            program=PROGRAM,
            title=self.title,
            name=folder.name,
            placement=self.nodes.placement,
            gpus=on_gpus,
            gpu_type=self.nodes.gpu_type,
            time_limit_min=TIME_LIMIT_MIN,
            start=self.start,
            variables=self._variables(),
            modules=config.modules,
            profiles=(*([fabric.profile] if fabric and fabric.profile else []), *config.profiles),
            prolog=config.prolog,
            vboost=boost(self.options, config, self.nodes.placement) if on_gpus else None,
            binding=binding(self.options, config),
            python=config.python or self.options.python,
            container=mounted_folders(config.container, [str(self.site.install)]),
            work=(PYTHON, "-P", "-m", self.program, RUN_FOLDER),
            finish=(PYTHON, "-P", "-m", FINISH, RUN_FOLDER),
            log=folder.log.name,
        )
        return self.scheduler.completed(spec, self.options, self.site)

    @property
    def _fabric(self) -> Fabric | None:
        return self.site.fabric if self.nodes.device == "cuda" else None

    def _variables(self) -> tuple[Variable, ...]:
        """Those of a run, without the ones of a recipe."""
        site, fabric = self.site, self._fabric
        given = [
            VariableLayer("cluster_config.yaml", site.config.environment),
            VariableLayer("--env", self.options.variables),
            VariableLayer("bench", {"LLMB_INSTALL": str(site.install), "PYTHONUNBUFFERED": "1"}),
        ]
        shipped = [VariableLayer(f"fabric {fabric.fabric}", fabric.variables)] if fabric else []
        return layered(shipped, site.shell, given)

    def sample_folder(self) -> RunFolder:
        return RunFolder(self.site.install / FOLDER / f"{self.name}_SECONDS" / self.name)

    def script(self) -> str:
        """The batch script in a folder that need not exist. Raises UsageError if the job is not possible."""
        folder = self.sample_folder()
        return self.scheduler.script(self.spec(folder), folder)


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One that was queued."""

    folder: RunFolder
    job_id: str

    @property
    def asked(self) -> AskedJob:
        key = self.folder.path.parent.name
        return AskedJob(key=key, job_id=self.job_id, base=self.folder, array_index=None, live=True)


def submit_bench(order: BenchOrder, environ: Mapping[str, str]) -> BenchJob:
    """Raises UsageError and EnvironmentProblem if it is rejected, InfrastructureError without an answer."""
    order.script()
    folder = stamped_folder(order.site.install / FOLDER, order.name)
    spec = order.spec(folder)
    try:
        for name, text in {TASK: order.task.model_dump_json(indent=2) + "\n", **order.files}.items():
            write_atomically(folder.path / name, text)
        write_spec(folder, spec)
        write_atomically(folder.batch_script, order.scheduler.script(spec, folder))
    except OSError as error:
        raise cannot_write(folder.path, error) from error
    submitted = order.scheduler.submit(spec, folder, environ, again=False)
    return BenchJob(folder, submitted.ids[None])


def wait_for_bench(job: BenchJob, on_state: Callable[[JobState], None]) -> BenchEnd:
    """What the job wrote when it ended.

    Raises RunFailed if it wrote nothing, InfrastructureError if the scheduler does not answer for ten minutes, and
    UserInterrupt, after which the job goes on.
    """
    scheduler = find_scheduler(QUEUE)
    try:
        with signals_as_exceptions() as signals:
            signals.let_through()
            state = _ended(scheduler, job, on_state)
            return _end_of(job, state)
    except Interrupted as signal:
        raise UserInterrupt(
            f"interrupted by {signal}; job {job.job_id} goes on and keeps its result", where=str(job.folder.path)
        ) from signal


def _ended(scheduler: Scheduler, job: BenchJob, on_state: Callable[[JobState], None]) -> JobState:
    heard = time.monotonic()
    while True:
        try:
            state = scheduler.states([job.asked], ASK_S).states.get(job.asked.key, JobState(job_id=job.job_id))
            heard = time.monotonic()
            on_state(state)
            if state.ended or (job.folder.path / END).exists():
                return state
        except InfrastructureError:
            if time.monotonic() - heard > PATIENCE_S:
                raise
        time.sleep(ASK_EVERY_S)


def _end_of(job: BenchJob, state: JobState) -> BenchEnd:
    path, until = job.folder.path / END, time.monotonic() + SETTLE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(ASK_EVERY_S)
    if not path.exists():
        how = state.meaning or state.state
        raise RunFailed(f"job {job.job_id} ended without a result: {how}", where=str(job.folder.log))
    return BenchEnd.model_validate_json(path.read_text())


def job_nodes(catalogue: Catalogue, site: Site, options: JobOptions, device: DeviceChoice, ranks: int | None) -> Nodes:
    """``ranks`` are those of a node. Raises UsageError if their number is not specified."""
    chosen = find_scheduler(QUEUE).defaults(site, options)
    on_gpus = device == "cuda" if device != "auto" else chosen.gpu_type not in (None, CPU)
    gpu = catalogue.gpus.get(chosen.gpu_type or "") if on_gpus else None
    per_node = ranks or options.gpus_per_node or chosen.gpus_per_node or (gpu.gpus_per_node if gpu else None)
    if per_node is None:
        raise UsageError("the number of processes per node is not specified", do="add --ranks or --gpus-per-node")
    placement = Placement(options.nodes or 1, per_node, whole_nodes=on_gpus)
    return Nodes(placement, "cuda" if on_gpus else "cpu", chosen.gpu_type if on_gpus else CPU)

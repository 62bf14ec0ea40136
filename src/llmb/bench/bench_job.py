# SPDX-License-Identifier: Apache-2.0
"""Measurements of nodes as a job of the scheduler, in a folder of its own below the root of installation."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from llmb.bench.device_bench import DeviceChoice
from llmb.bench.pairs import PairwiseResult
from llmb.bench.records import MeasurementFile
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.errors import RunFailed, UsageError, UserInterrupt
from llmb.jobs.job import Job
from llmb.jobs.task import BENCHMARKS, TaskOrder, TaskRecord
from llmb.jobspec.options import JobOptions, StartMode
from llmb.jobspec.spec import PYTHON, RUN_FOLDER, Placement
from llmb.processes.families import started_program
from llmb.processes.signals import Interrupted
from llmb.runs.claim import stamped_folder
from llmb.runs.folder import RunFolder
from llmb.runs.host import Device
from llmb.schedulers.lookup import scheduler_of
from llmb.site.site import Site

FINISH = "llmb.bench.finish_bench"
REQUEST, END = "bench_request.json", "bench_end.json"
TIME_LIMIT_MIN = 30
LOOK_EVERY_S, SETTLE_S = 0.5, 10.0
"""How long the files of a job that has ended may take to show here."""
Kind = Literal["collectives", "gpus", "pairwise"]


class BenchRequest(Record):
    """What the end of the job has to know: ``bench_request.json``."""

    schema_version: Literal[1] = 1
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
    pairwise: PairwiseResult | None = None


@dataclass(frozen=True, slots=True)
class BenchProgram:
    """What a job runs: how it is started, and the file that it reads."""

    kind: Kind
    module: str
    start: StartMode | Literal["agents"]
    file: str
    time_limit_min: int = TIME_LIMIT_MIN


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the processes of a job run on; ``gpu_type`` is None for GPUs of an unknown type."""

    placement: Placement
    device: Device
    gpu_type: str | None


def bench_order(
    request: BenchRequest,
    program: BenchProgram,
    title: str,
    document: str,
    nodes: Nodes,
    options: JobOptions,
    site: Site,
) -> TaskOrder:
    """The job of ``program``, which reads ``document``."""
    return TaskOrder(
        task=TaskRecord(
            kind="benchmark",
            subject=program.kind,
            gpus=nodes.device == "cuda",
            gpu_type=nodes.gpu_type,
            scale=nodes.placement.processes,
        ),
        name=f"bench_{program.kind}",
        parent=site.install / BENCHMARKS,
        title=title,
        placement=nodes.placement,
        time_limit_min=program.time_limit_min,
        work=(PYTHON, "-P", "-m", program.module, RUN_FOLDER),
        finish=(PYTHON, "-P", "-m", FINISH, RUN_FOLDER),
        files={REQUEST: request.model_dump_json(indent=2) + "\n", program.file: document},
        start=program.start,
        measured=True,
        options=options,
        site=site,
    )


def end_of(job: Job) -> BenchEnd:
    """What a job wrote at its end, which may show here later. Raises RunFailed if it wrote nothing."""
    return _end_in(RunFolder(Path(job.run_dir)), f"job {job.job_id}", job.reason or job.state)


def _end_in(folder: RunFolder, what: str, how: str) -> BenchEnd:
    path, until = folder.path / END, time.monotonic() + SETTLE_S
    while not path.exists():
        if time.monotonic() > until:
            raise RunFailed(f"{what} ended without a result: {how}", where=str(folder.log))
        time.sleep(LOOK_EVERY_S)
    return BenchEnd.model_validate_json(path.read_text())


def run_here(order: TaskOrder, environ: Mapping[str, str]) -> BenchEnd:
    """Measures on the nodes of the scheduler's job that this process runs in.

    Raises RunFailed if nothing was measured, UserInterrupt, UsageError and EnvironmentProblem.
    """
    folder = stamped_folder(order.parent, order.name)
    order.write(folder)
    variables = order.scheduler.variables_here(environ)
    with folder.batch_output.open("ab") as talk:
        try:
            code = _run_script(("bash", str(folder.batch_script)), talk, variables)
        except Interrupted as error:
            raise UserInterrupt(f"interrupted by {error}", where=str(folder.path)) from error
    return _end_in(folder, "the measurement", f"exit code {code}")


def _run_script(command: Sequence[str], talk: IO[bytes], variables: Mapping[str, str]) -> int:
    with started_program(command, talk, subprocess.STDOUT, variables) as process:
        try:
            return process.wait()
        except Interrupted:
            # The script waits for what it started, which has to end first.
            os.killpg(process.pid, signal.SIGTERM)
            raise


def job_nodes(catalogue: Catalogue, site: Site, options: JobOptions, device: DeviceChoice, ranks: int | None) -> Nodes:
    """``ranks`` are those of a node. Raises UsageError if their number is not specified."""
    chosen = scheduler_of(site).defaults(site, options)
    on_gpus = device == "cuda" if device != "auto" else chosen.gpu_type not in (None, CPU)
    gpu = catalogue.gpus.get(chosen.gpu_type or "") if on_gpus else None
    per_node = ranks or options.gpus_per_node or chosen.gpus_per_node or (gpu.gpus_per_node if gpu else None)
    if per_node is None:
        raise UsageError("the number of processes per node is not specified", do="add --ranks or --gpus-per-node")
    placement = Placement(options.nodes or 1, per_node, whole_nodes=on_gpus)
    return Nodes(placement, "cuda" if on_gpus else "cpu", chosen.gpu_type if on_gpus else CPU)

# SPDX-License-Identifier: Apache-2.0
"""Measures nodes in jobs of the scheduler, each of which has a folder in the install root.

At its end, a job calls ``python -m llmb.nodes.bench.bench_job RUN_FOLDER EXIT_CODE SIGNAL``, which saves the
measurements, even if no client waits for the job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import llmb
from llmb.base.errors import LlmbError, RunFailed, UsageError, UserInterrupt
from llmb.base.processes import Interrupted, started_program
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Record
from llmb.catalogue.resolve import CPU
from llmb.jobs.job import Job
from llmb.jobs.task import BENCHMARKS, TaskOrder, TaskRecord, read_task
from llmb.launch.jobspec.job_options import JobOptions, StartMode
from llmb.launch.jobspec.spec import PYTHON, RUN_FOLDER, Placement, read_spec
from llmb.launch.scheduler_lookup import find_scheduler, scheduler_of
from llmb.launch.site.site import Site
from llmb.nodes.bench.collective_bench import TABLE, collective_texts, measurement_file, read_result
from llmb.nodes.bench.device_bench import DeviceChoice
from llmb.nodes.bench.measurements import MeasurementFile, write_measurements
from llmb.nodes.bench.pair_rounds import STEPS, expected_s, limit_s, read_rounds
from llmb.nodes.bench.pairs import JOB as JOB_OF_PAIRS
from llmb.nodes.bench.pairs import PairJob, PairwiseResult, decide, group_notes, members, pair_rule
from llmb.nodes.bench.protocol import COLLECTIVES_JOB, CollectiveJob
from llmb.nodes.bench.slow_gpus import gpu_files, read_parts
from llmb.nodes.doctor.checked_nodes import JudgedNodes, write_judged
from llmb.readers.samples.host import Device
from llmb.runs.experiment import stamped_folder
from llmb.runs.folder import RunFolder, write_atomically

FINISH = "llmb.nodes.bench.bench_job"
REQUEST, END = "bench_request.json", "bench_end.json"
TIME_LIMIT_MIN = 30
LOOK_EVERY_S, SETTLE_S = 0.5, 10.0
"""Seconds between polls, and seconds until the files of an ended job must be visible on this machine."""
Kind = Literal["collectives", "gpus", "pairwise"]


class BenchRequest(Record):
    """The content of ``bench_request.json``, which is read at the end of the job."""

    schema_version: Literal[1] = 1
    install: str
    command: tuple[str, ...]
    measured_at: str


class BenchEnd(Record):
    """The content of ``bench_end.json``, the result of a job; ``kept`` contains the paths of files that it saved."""

    schema_version: Literal[1] = 1
    measured: tuple[MeasurementFile, ...] = ()
    kept: tuple[str, ...] = ()
    problem: str | None = None
    missing_nodes: tuple[str, ...] = ()
    """Nodes that did not report, if GPUs were measured."""
    pairwise: PairwiseResult | None = None


@dataclass(frozen=True, slots=True)
class BenchProgram:
    """The program that a job runs, and the contents of its input files by name."""

    kind: Kind
    module: str
    start: StartMode | Literal["rounds"]
    files: Mapping[str, str]
    time_limit_min: int = TIME_LIMIT_MIN


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes on which a job measures; ``gpu_type`` is None for GPUs of an unknown type."""

    placement: Placement
    device: Device
    gpu_type: str | None


def bench_order(
    request: BenchRequest, program: BenchProgram, title: str, nodes: Nodes, options: JobOptions, site: Site
) -> TaskOrder:
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
        files={REQUEST: request.model_dump_json(indent=2) + "\n", **program.files},
        start=program.start,
        measured=True,
        options=options,
        site=site,
    )


def end_of(job: Job) -> BenchEnd:
    """Read the result of an ended job, waiting until it is visible here; raise RunFailed if it does not appear."""
    return _end_in(RunFolder(Path(job.run_dir)), f"job {job.job_id}", job.reason or job.state)


def _end_in(folder: RunFolder, what: str, how: str) -> BenchEnd:
    path, until = folder.path / END, time.monotonic() + SETTLE_S
    while not path.exists():
        if time.monotonic() > until:
            raise RunFailed(f"{what} ended without a result: {how}", where=str(folder.log))
        time.sleep(LOOK_EVERY_S)
    return BenchEnd.model_validate_json(path.read_text())


def run_here(order: TaskOrder, environ: Mapping[str, str]) -> BenchEnd:
    """Measure on the nodes of the scheduler's job in which this process runs. Raises RunFailed if there is no result,
    UserInterrupt on a signal, and the errors of ``JobOrder.write``."""
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
            # The script waits for its child processes, which must end first.
            os.killpg(process.pid, signal.SIGTERM)
            raise


def job_nodes(catalogue: Catalogue, site: Site, options: JobOptions, device: DeviceChoice, ranks: int | None) -> Nodes:
    """Return the nodes for a job with ``ranks`` processes per node, by default the number of GPUs per node. Raises
    UsageError if that is unknown, and the errors of ``Cluster.defaults``."""
    scheduler = scheduler_of(site)
    chosen = scheduler.defaults(site, options)
    on_gpus = device == "cuda" if device != "auto" else chosen.gpu_type not in (None, CPU)
    gpu = catalogue.gpus.get(chosen.gpu_type or "") if on_gpus else None
    per_node = ranks or options.gpus_per_node or chosen.gpus_per_node or (gpu.gpus_per_node if gpu else None)
    if per_node is None:
        key = scheduler.gpus_key if CPU in (device, chosen.gpu_type) else "gpu_type"
        do = f"set {key} in cluster_config.yaml or, if the command has them, pass --device and --ranks"
        raise UsageError("the number of processes per node is not specified", do=do)
    placement = Placement(options.nodes or 1, per_node, whole_nodes=on_gpus)
    return Nodes(placement, "cuda" if on_gpus else "cpu", chosen.gpu_type if on_gpus else CPU)


def finish_bench(folder: RunFolder, exit_code: int, signal: str) -> BenchEnd:
    """Save the measurements of a job, and write and return its result, even if workers failed."""
    request = BenchRequest.model_validate_json((folder.path / REQUEST).read_text())
    subject = read_task(folder).subject
    if subject == "pairwise":
        return _conclude_pairs(folder, request)
    measured: tuple[MeasurementFile, ...] = ()
    missing: tuple[str, ...] = ()
    problem = None
    try:
        measured = _collectives(folder.path, request) if subject == "collectives" else _gpus(folder.path, request)
    except LlmbError as error:
        problem = error.what
    if exit_code:
        how = f"signal {signal}" if signal else f"exit code {exit_code}"
        problem = f"the workers ended with {how}; see {folder.log}"
    if subject == "gpus":
        reported = {file.node for file in measured}
        missing = tuple(node for node in _nodes(folder) if node not in reported)
    paths = tuple(str(write_measurements(Path(request.install), file)) for file in measured if file.measurements)
    end = BenchEnd(measured=measured, kept=paths, problem=problem, missing_nodes=missing)
    write_atomically(folder.path / END, end.model_dump_json(indent=2) + "\n")
    return end


def _collectives(folder: Path, request: BenchRequest) -> tuple[MeasurementFile, ...]:
    job, result = CollectiveJob.model_validate_json((folder / COLLECTIVES_JOB).read_text()), read_result(folder)
    write_atomically(folder / TABLE, "\n".join(collective_texts(job, result, llmb.__version__)))
    return (measurement_file(job, result, request.command, request.measured_at),)


def _gpus(folder: Path, request: BenchRequest) -> tuple[MeasurementFile, ...]:
    return tuple(gpu_files(read_parts(folder), request.command, request.measured_at))


def _nodes(folder: RunFolder) -> list[str]:
    scheduler = find_scheduler(read_spec(folder).scheduler)
    return scheduler.host_names(scheduler.current_job(os.environ).nodes)


def _conclude_pairs(folder: RunFolder, request: BenchRequest) -> BenchEnd:
    """Judge the nodes by all steps that ran, even if the rounds did not complete, and write the result."""
    job = PairJob.model_validate_json((folder.path / JOB_OF_PAIRS).read_text())
    rule, readings = pair_rule(job.device), read_rounds(folder.path, job, _nodes(folder))
    verdicts, notes = decide(readings, rule)
    group = members(verdicts)
    figures, problem = readings.group or (None, None)
    begun_s = [path.stat().st_mtime for path in (folder.path / STEPS).glob(f"*/{JOB_OF_PAIRS}")]
    result = PairwiseResult(
        started_at=request.measured_at,
        nodes=tuple(verdicts),
        notes=(*notes, *group_notes(readings, group, rule)),
        expected_s=expected_s(job.nodes, job.per_node),
        limit_s=limit_s(job.nodes, job.per_node),
        took_s=time.time() - min(begun_s, default=time.time()),
        group=None if problem else figures,
        alone=tuple(readings.alone.values()),
        pairs=tuple(readings.pairs),
    )
    nodes = {word: tuple(result.names(fit=fit)) for word, fit in (("fit", True), ("unfit", False), ("undecided", None))}
    file = write_judged(Path(request.install), JudgedNodes(started_at=result.started_at, **nodes))
    end = BenchEnd(kept=(str(file),), pairwise=result)
    write_atomically(folder.path / END, end.model_dump_json(indent=2) + "\n")
    return end


if __name__ == "__main__":
    finish_bench(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])

# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives`` and ``gpus``, on several devices here or in a job; and the saving of any measurement."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.bench.bench_job import (
    TIME_LIMIT_MIN,
    BenchEnd,
    BenchProgram,
    BenchRequest,
    bench_order,
    end_of,
    job_nodes,
)
from llmb.bench.device_bench import DeviceChoice, device_here
from llmb.bench.gpus import Parts, compare_parts, gpu_files, gpus_job, measure_parts, outlier_rule
from llmb.bench.measurements import JOB as GPUS_FILE
from llmb.bench.measurements import PROGRAM as GPUS_PROGRAM
from llmb.bench.measurements import MeasurementFile, write_measurements
from llmb.catalogue.load import Catalogue
from llmb.cli.campaign_options import with_excluded
from llmb.cli.common import Json
from llmb.cli.options import given_of, takes, value_options
from llmb.cli.progress import CaseProgress, JobStates
from llmb.cli.root import install_here, say
from llmb.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.submit import submit_task, unanswered_is_explained
from llmb.jobs.task import TaskOrder
from llmb.jobs.wait import Watch, wait_for_one
from llmb.jobspec.options import JobOptions
from llmb.options.option import Option
from llmb.report.bench_report import advice, gpus_document, gpus_tables
from llmb.report.campaign_report import flags_text
from llmb.report.output import print_line, print_output
from llmb.resources.host import Device
from llmb.runs.folder import RunFolder
from llmb.runs.record import now
from llmb.schedulers.lookup import read_cluster_site, read_job_options, scheduler_of, scheduler_options
from llmb.shown_text import listed
from llmb.site.machine import this_machine


def save_and_show(install: Path, files: Sequence[MeasurementFile], show: Callable[[], None]) -> tuple[str, ...]:
    """Where they were saved. Raises NotWritable after the result is shown: minutes of measuring may be in it."""
    try:
        return tuple(str(write_measurements(install, file)) for file in files)
    finally:
        show()


OF_RUNS = frozenset(("retries", "start", "segment", "signal_before"))
"""Options of the scheduler that measurements have no use for."""
SAID_HERE: Mapping[str, Mapping[str, Any]] = {
    "nodes": {"help": "Nodes of the job. Default: 1.", "basic": True},
    "time_limit": {"help": f"Minutes, hh:mm:ss or d-hh:mm:ss. Default: {TIME_LIMIT_MIN} minutes."},
    "gpus_per_node": {"help": "GPUs, or processes on a CPU. Default: cluster_config.yaml, else the GPU type's."},
    "exclude": {"basic": True},
}
"""What options of the scheduler mean for measurements."""
OF_JOBS: dict[str, Option] = {
    name: replace(item, **SAID_HERE.get(name, {})) for name, item in scheduler_options().items() if name not in OF_RUNS
}
JOB = value_options(OF_JOBS.values(), envvar=False)
Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Processes, for a job on each node. Default: one per GPU.")
]
Wait = Annotated[bool, typer.Option("--wait", help="For a job: wait for its end and print the result.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="For a job: print the batch script, queue nothing.")]


def check_is_job(given: Mapping[str, Any], *, wait: bool, dry_run: bool) -> bool:
    """Any option of the scheduler makes a measurement a job. Raises UsageError for options of a job without one."""
    for flag, chosen in {"--wait": wait, "--dry-run": dry_run}.items():
        if chosen and not given:
            raise UsageError(f"{flag} is for jobs that are queued", do="add --nodes, such as --nodes 2")
    return bool(given)


class BenchJobRequest:
    """A job that a command asks for."""

    def __init__(
        self, values: Mapping[str, Any], device: DeviceChoice, ranks: int | None, here: JobOptions | None = None
    ) -> None:
        """``here``: of the job that this process runs in, whose nodes are to be measured. Raises UsageError."""
        catalogue, self.install = Catalogue(), install_here()
        self.site = read_cluster_site(catalogue, self.install, os.environ)
        chosen = with_excluded({name: values[name] for name in OF_JOBS})
        self.options = read_job_options(self.site, chosen, os.environ, sys.executable)
        self.here = here
        if here:
            gpus, flags = here.gpus_per_node or self.options.gpus_per_node, {**self.options.flags, **here.flags}
            self.options = replace(self.options, nodes=here.nodes, gpus_per_node=gpus, flags=flags)
        self.nodes = job_nodes(catalogue, self.site, self.options, device, ranks)
        self.device: Device = self.nodes.device

    def order(self, program: BenchProgram, title: str) -> TaskOrder:
        request = BenchRequest(
            install=str(self.install),
            command=command_line(),
            measured_at=now(),
        )
        return bench_order(request, program, title, self.nodes, self.options, self.site)


def queue(order: TaskOrder, *, dry_run: bool, wait: bool, json: bool) -> tuple[BenchEnd, RunFolder] | None:
    """What the job measured and its folder, if it was waited for; else the job is shown. Raises RunFailed."""
    script, install = order.script(), order.site.install
    if dry_run:
        print_output({"script": script} if json else script)
        return None
    say(f"the job requests {flags_text(order.sample().flags)}")
    with open_history(install, say) as store, unanswered_is_explained():
        job = submit_task(store, order, os.environ)
    if not wait:
        _show_job(job, json=json)
        return None
    say(f"job {job.job_id}: {job.run_dir}")
    end = end_of(wait_for_one(install, job, os.environ, say, Watch(JobStates(say), lambda _: None)))
    folder = RunFolder(Path(job.run_dir))
    if end.problem and not any(file.measurements for file in end.measured):
        raise RunFailed(end.problem, where=str(folder.log))
    if end.problem:
        say(f"warning: {end.problem}")
    return end, folder


def job_here() -> JobOptions | None:
    """The nodes of the scheduler's job that this process runs in; None outside of one."""
    here = scheduler_of(read_cluster_site(Catalogue(), install_here(), os.environ)).options_here(os.environ)
    return here if here.nodes else None


def _show_job(job: Job, *, json: bool) -> None:
    if json:
        print_output({"job_id": job.job_id, "run_dir": job.run_dir})
    else:
        do = f"'llmb jobs log {job.job_id} --follow' follows it, 'llmb bench list' shows its result"
        print_line(f"queued as job {job.job_id} in {job.run_dir}; {do}")


def ranks_here(choice: DeviceChoice, ranks: int | None, *, on_cpu: int) -> tuple[Device, int]:
    """The device and the processes of a measurement on this machine. Raises EnvironmentProblem for too few GPUs."""
    machine = this_machine()
    device = device_here(choice, machine)
    here = len(machine.gpu_names) if device == "cuda" else on_cpu
    if device == "cuda" and ranks and ranks > here:
        raise EnvironmentProblem(f"{ranks} ranks need as many GPUs, and this machine has {here}", do="lower --ranks")
    return device, here if ranks is None else ranks


def command_line() -> tuple[str, ...]:
    """As it is kept beside what was measured."""
    return ("llmb", *sys.argv[1:])


@takes(JOB)
def gpus(
    values: dict[str, Any],
    ctx: typer.Context,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="How long the product is repeated; the last third counts.")
    ] = 5.0,
    ranks: Ranks = None,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="'auto': GPUs if there are any, else CPUs.")
    ] = "auto",
    wait: Wait = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Find slow GPUs: the same matrix product on every GPU at once.

    On the GPUs of this machine, or in a job: --nodes, or any other option of the scheduler. Nodes do not talk to each
    other, so one that is broken keeps no other from its result. A GPU is slow if it is more than 5 % and more than 4
    robust standard deviations below the median; it is named by node, local rank and UUID, with the list of nodes for
    'llmb submit --exclude'.

    Exit codes: 0 no GPU is slow, 4 one is slow, failed, or did not report.

    Examples:

    - `llmb bench gpus`

    - `llmb bench gpus --nodes 16 --partition batch --wait`
    """
    if check_is_job(given_of(ctx, values), wait=wait, dry_run=dry_run):
        request = BenchJobRequest(values, device, ranks)
        job = gpus_job(request.device, seconds)
        program = BenchProgram("gpus", GPUS_PROGRAM, "task-per-gpu", {GPUS_FILE: job.model_dump_json()})
        title = f"a product on {request.nodes.placement.processes} devices, by llmb"
        done = queue(request.order(program, title), dry_run=dry_run, wait=wait, json=json)
        if done:
            parts = compare_parts(done[0].measured, done[0].missing_nodes, outlier_rule())
            _show_parts(parts, json=json)
            _conclude_parts(parts, done[0].kept)
    else:
        install = install_here()
        files = _measured_here(device, ranks, seconds)
        parts = compare_parts(files, (), outlier_rule())
        _conclude_parts(parts, save_and_show(install, files, lambda: _show_parts(parts, json=json)))


def _measured_here(choice: DeviceChoice, ranks: int | None, seconds: float) -> list[MeasurementFile]:
    device, ranks = ranks_here(choice, ranks, on_cpu=this_machine().cores)
    measured_at = now()
    with CaseProgress() as progress:
        reports = measure_parts(gpus_job(device, seconds), ranks, progress.case)
    return list(gpu_files(reports, command_line(), measured_at))


def _show_parts(parts: Parts, *, json: bool) -> None:
    print_output(gpus_document(parts, outlier_rule()) if json else gpus_tables(parts, outlier_rule()))


def _conclude_parts(parts: Parts, kept: Sequence[str]) -> None:
    """Raises RunFailed if a node is unfit."""
    if kept:
        say(f"saved to {listed(map(str, kept), 1)}")
    slow = [f"{part.row.node} rank {part.row.rank}" for part in parts.slow]
    other = [*(f"{node} {row.case}" for node, row in parts.failed), *parts.missing_nodes]
    if slow or other:
        named = [f"slow: {', '.join(slow)}"] if slow else []
        raise RunFailed(
            "; ".join([*named, *([f"not measured: {', '.join(other)}"] if other else [])]), do=advice(parts)
        )

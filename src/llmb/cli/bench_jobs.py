# SPDX-License-Identifier: Apache-2.0
"""``llmb bench`` in jobs, and the saving of what any of its commands measured."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
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
from llmb.bench.device_bench import DeviceChoice
from llmb.bench.kept_measurements import write_measurements
from llmb.bench.records import MeasurementFile
from llmb.catalogue.load import Catalogue
from llmb.cli.campaign_options import with_excluded
from llmb.cli.options import value_options
from llmb.cli.progress import JobStates
from llmb.cli.root import install_here, say
from llmb.errors import RunFailed, UsageError
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.submit import submit_task, unanswered_is_explained
from llmb.jobs.task import TaskOrder
from llmb.jobs.wait import Watch, wait_for_one
from llmb.options.option import Option
from llmb.report.campaign_report import flags_text
from llmb.report.output import print_json, print_line, print_output
from llmb.runs.folder import RunFolder
from llmb.runs.host import Device
from llmb.schedulers.lookup import read_cluster_site, read_job_options, scheduler_options


def save_and_show(install: Path, files: Sequence[MeasurementFile], show: Callable[[], None]) -> tuple[str, ...]:
    """Where they were saved. Raises NotWritable after the result is shown: minutes of measuring may be in it."""
    try:
        return tuple(str(write_measurements(install, file)) for file in files)
    finally:
        show()


OF_RUNS = frozenset(("array", "retries", "requeue", "start", "segment", "signal_before"))
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
            raise UsageError(f"{flag} is for jobs; this measures on this machine", do="add --nodes, such as --nodes 2")
    return bool(given)


class BenchJobRequest:
    """A job that a command asks for."""

    def __init__(self, values: Mapping[str, Any], device: DeviceChoice, ranks: int | None) -> None:
        """Raises UsageError."""
        catalogue, self.install = Catalogue(), install_here()
        self.site = read_cluster_site(catalogue, self.install, os.environ)
        chosen = with_excluded({name: values[name] for name in OF_JOBS})
        self.options = read_job_options(self.site, chosen, os.environ, sys.executable)
        self.nodes = job_nodes(catalogue, self.site, self.options, device, ranks)
        self.device: Device = self.nodes.device

    def order(self, program: BenchProgram, title: str, document: str) -> TaskOrder:
        request = BenchRequest(
            install=str(self.install),
            command=("llmb", *sys.argv[1:]),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return bench_order(request, program, title, document, self.nodes, self.options, self.site)


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
        _show(job, json=json)
        return None
    say(f"job {job.job_id}: {job.run_dir}")
    end = end_of(wait_for_one(install, job, os.environ, say, Watch(JobStates(say), lambda _: None)))
    folder = RunFolder(Path(job.run_dir))
    if end.problem and not any(file.measurements for file in end.measured):
        raise RunFailed(end.problem, where=str(folder.log))
    if end.problem:
        say(f"warning: {end.problem}")
    return end, folder


def _show(job: Job, *, json: bool) -> None:
    if json:
        print_json({"job_id": job.job_id, "run_dir": job.run_dir})
    else:
        do = f"'llmb jobs log {job.job_id} --follow' follows it, 'llmb bench list' shows its result"
        print_line(f"queued as job {job.job_id} in {job.run_dir}; {do}")

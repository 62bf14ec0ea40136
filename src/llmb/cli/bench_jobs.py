# SPDX-License-Identifier: Apache-2.0
"""``llmb bench gpus`` and ``collectives``: measurements of several devices, on this machine or in a job."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import llmb
from llmb.base.errors import EnvironmentProblem, RunFailed, UsageError
from llmb.base.options import Option, build, options_of
from llmb.base.shown_text import listed
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import model_of
from llmb.catalogue.resolve import Request
from llmb.cli.common import Json
from llmb.cli.progress import CaseProgress, JobStates
from llmb.cli.root import install_here, say
from llmb.cli.shared_options import flags_of, takes, value_options, with_excluded
from llmb.jobs.history import open_history
from llmb.jobs.submit import submit_task, unanswered_is_explained
from llmb.jobs.task import TaskOrder
from llmb.jobs.wait import Watch, wait_for_one
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.scheduler_lookup import read_cluster_site, read_job_options, scheduler_of, scheduler_options
from llmb.launch.site.site import this_machine
from llmb.nodes.bench import pair_rounds
from llmb.nodes.bench.bench_job import (
    END,
    TIME_LIMIT_MIN,
    BenchEnd,
    BenchProgram,
    BenchRequest,
    bench_order,
    end_of,
    job_nodes,
    run_here,
)
from llmb.nodes.bench.collective_bench import (
    LEAST_BYTES,
    TABLE,
    CollectiveRequest,
    collective_job,
    collective_texts,
    expert_exchange,
    measure_here,
    measurement_file,
    parse_collectives,
    raise_if_wrong,
)
from llmb.nodes.bench.device_bench import (
    DeviceChoice,
    bytes_of,
    device_here,
    raise_if_incomplete,
    recipe_text,
    resolved_here,
)
from llmb.nodes.bench.measurements import JOB as GPUS_FILE
from llmb.nodes.bench.measurements import PROGRAM as GPUS_PROGRAM
from llmb.nodes.bench.measurements import MeasurementFile, write_measurements
from llmb.nodes.bench.pair_rounds import SCHEDULE, expected_s, limit_s, schedule
from llmb.nodes.bench.pairs import LEAST_NODES, pair_files
from llmb.nodes.bench.protocol import COLLECTIVES_JOB, COLLECTIVES_PROGRAM
from llmb.nodes.bench.slow_gpus import (
    Parts,
    compare_parts,
    gpu_files,
    gpus_document,
    gpus_job,
    measure_parts,
    outlier_rule,
)
from llmb.readers.samples.host import Device
from llmb.reports.bench_report import (
    advice,
    gpus_tables,
    measurement_document,
    not_measured_table,
    pairs_document,
    pairs_tables,
)
from llmb.reports.formats import duration
from llmb.reports.jobs_report import flags_text
from llmb.reports.output import print_line, print_output
from llmb.runs.folder import RunFolder
from llmb.runs.record import now


def save_and_show(install: Path, files: Sequence[MeasurementFile], show: Callable[[], None]) -> tuple[str, ...]:
    """Save the files and return their paths. The result is shown even if saving fails, which raises NotWritable."""
    try:
        return tuple(str(write_measurements(install, file)) for file in files)
    finally:
        show()


OF_RUNS = frozenset(("retries", "start", "segment", "signal_before"))
"""Options of the scheduler that do not apply to measurements."""
OPTION_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "nodes": {"help": "Nodes of the job. Default: 1.", "basic": True},
    "time_limit": {
        "help": "Time limit as minutes, hh:mm:ss or d-hh:mm:ss. Default: from settings, else "
        f"{TIME_LIMIT_MIN} minutes, or the longest time that --pairwise can take."
    },
    "gpus_per_node": {"help": "GPUs per node, or processes on a CPU. Default: from settings, else the GPU type's."},
    "exclude": {"basic": True},
}
"""Changes to the scheduler's options for measurements, by name."""
OF_JOBS: dict[str, Option] = {
    name: replace(item, **OPTION_CHANGES.get(name, {}))
    for name, item in scheduler_options().items()
    if name not in OF_RUNS
}
JOB = value_options(OF_JOBS.values(), envvar=False)
NAMES = ("workload", "size", "scale", "gpu_type", "release", "tp", "cp", "ep", "etp", "mbs", "seq_len")
OF_SHAPES = [option for name, option in options_of(Request).items() if name in NAMES]
"""The options of a recipe that determine its shapes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Options of a measurement of several devices, on this machine or in a job."""

    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Processes per node. Default: 1 per GPU; on a local CPU, 1 per core (collectives: 4).",
        ),
    ] = None
    device: Annotated[
        DeviceChoice,
        typer.Option(
            "--device", help="'auto': GPUs if this machine has any (in a job: if the settings do), else CPUs."
        ),
    ] = "auto"
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job to end, and print the result.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job's batch script; queue nothing.")] = False
    json: Json = False

    def is_job(self, given: Mapping[str, Any]) -> bool:
        """Return whether a scheduler option is set; raise UsageError if only --wait or --dry-run is set."""
        for flag, chosen in {"--wait": self.wait, "--dry-run": self.dry_run}.items():
            if chosen and not given:
                raise UsageError(f"{flag} requires a queued job", do="add --nodes, such as --nodes 2")
        return bool(given)

    def here(self, on_cpu: int) -> tuple[Device, int]:
        """Return the device and the number of processes here; raise EnvironmentProblem if there are too few GPUs."""
        machine = this_machine()
        device = device_here(self.device, machine)
        here = len(machine.gpu_names) if device == "cuda" else on_cpu
        if device == "cuda" and self.ranks and self.ranks > here:
            what = f"{self.ranks} ranks need one GPU each, but this machine has {here}"
            raise EnvironmentProblem(what, do=f"pass --ranks {here} or fewer")
        return device, here if self.ranks is None else self.ranks


class BenchJobRequest:
    """A measurement in a job: its site, options and nodes."""

    def __init__(self, values: Mapping[str, Any], placed: Placed, here: JobOptions | None = None) -> None:
        """Read the site and the options; ``here`` selects the nodes of the current job."""
        catalogue, self.install = Catalogue(), install_here()
        self.site = read_cluster_site(catalogue, self.install, os.environ)
        chosen = with_excluded({name: values[name] for name in OF_JOBS})
        self.options = read_job_options(self.site, chosen, os.environ, sys.executable)
        self.here = here
        if here:
            gpus, flags = here.gpus_per_node or self.options.gpus_per_node, {**self.options.flags, **here.flags}
            self.options = replace(self.options, nodes=here.nodes, gpus_per_node=gpus, flags=flags)
        self.nodes = job_nodes(catalogue, self.site, self.options, placed.device, placed.ranks)
        self.device: Device = self.nodes.device

    def order(self, program: BenchProgram, title: str) -> TaskOrder:
        request = BenchRequest(install=str(self.install), command=command_line(), measured_at=now())
        return bench_order(request, program, title, self.nodes, self.options, self.site)


def queue(order: TaskOrder, placed: Placed) -> tuple[BenchEnd, RunFolder] | None:
    """Queue the job or print its script. With --wait, return its end and folder, or raise RunFailed without results."""
    script, install = order.script(), order.site.install
    if placed.dry_run:
        print_output({"script": script} if placed.json else script)
        return None
    say(f"the job requests {flags_text(order.sample().flags)}")
    with open_history(install, say) as store, unanswered_is_explained():
        job = submit_task(store, order, os.environ)
    if not placed.wait:
        if placed.json:
            print_output({"job_id": job.job_id, "run_dir": job.run_dir})
        else:
            shown = "'llmb bench list' shows its result"
            if order.task.subject == "pairwise":
                shown = f"its result will be in {END} there, and 'llmb submit --exclude unfit' uses it"
            do = f"'llmb jobs log {job.job_id} --follow' follows it, {shown}"
            print_line(f"queued as job {job.job_id} in {job.run_dir}; {do}")
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
    """Return the options of the job that this process runs in; None outside a job."""
    here = scheduler_of(read_cluster_site(Catalogue(), install_here(), os.environ)).options_here(os.environ)
    return here if here.nodes else None


def command_line() -> tuple[str, ...]:
    """Return the command line to save with measurements."""
    return ("llmb", *sys.argv[1:])


@takes(JOB, Placed)
def gpus(
    values: dict[str, Any],
    placed: Placed,
    ctx: typer.Context,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Seconds to repeat the matrix product; the last third is timed.")
    ] = 5.0,
) -> None:
    """Find slow GPUs by running the same matrix product on all GPUs at the same time.

    The GPUs are those of this machine or, with --nodes or another scheduler option, those of a job. Nodes do not
    communicate, so a broken node does not affect the others. A GPU is slow if its rate is more than 5 % and more than 4
    robust standard deviations below the median for its model. Slow GPUs are listed by node, local rank and UUID, with
    their nodes for 'llmb submit --exclude'.

    Exit codes: 0 no GPU is slow; 4 a GPU is slow, failed or did not report.

    Examples:

    - `llmb bench gpus`

    - `llmb bench gpus --nodes 16 --partition batch --wait`
    """
    if placed.is_job(flags_of(ctx, values)):
        request = BenchJobRequest(values, placed)
        job = gpus_job(request.device, seconds)
        program = BenchProgram("gpus", GPUS_PROGRAM, "task-per-gpu", {GPUS_FILE: job.model_dump_json()})
        title = f"a product on {request.nodes.placement.processes} devices, by llmb"
        if done := queue(request.order(program, title), placed):
            parts = compare_parts(done[0].measured, done[0].missing_nodes, outlier_rule())
            _show_parts(parts, json=placed.json)
            _conclude_parts(parts, done[0].kept)
        return
    install, (device, ranks), measured_at = install_here(), placed.here(on_cpu=this_machine().cores), now()
    with CaseProgress() as progress:
        reports = measure_parts(gpus_job(device, seconds), ranks, progress.case)
    files = list(gpu_files(reports, command_line(), measured_at))
    parts = compare_parts(files, (), outlier_rule())
    _conclude_parts(parts, save_and_show(install, files, lambda: _show_parts(parts, json=placed.json)))


def _show_parts(parts: Parts, *, json: bool) -> None:
    print_output(gpus_document(parts, outlier_rule()) if json else gpus_tables(parts, outlier_rule()))


def _conclude_parts(parts: Parts, kept: Sequence[str]) -> None:
    if kept:
        say(f"saved to {listed(map(str, kept), 1)}")
    slow = ", ".join(f"{part.row.node} rank {part.row.rank}" for part in parts.slow)
    other = ", ".join([*(f"{node} {row.case}" for node, row in parts.failed), *parts.missing_nodes])
    found = [f"{what}: {names}" for what, names in (("slow", slow), ("not measured", other)) if names]
    if found:
        raise RunFailed("; ".join(found), do=advice(parts))


RANKS_ON_CPU = 4
LEAST_RANKS = 2


@dataclass(frozen=True, slots=True)
class Sweep:
    """Options for the sizes and the calls of a measurement of collectives."""

    min_size: Annotated[str, typer.Option("--min-size", help="Smallest message, such as 64KiB.")] = f"{LEAST_BYTES}B"
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", help="Largest message. Default: 16GiB on GPUs, 16MiB on CPUs, if memory allows."),
    ] = None
    factor: Annotated[int, typer.Option("--factor", min=2, help="Factor between consecutive sizes.")] = 2
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Number of timed calls per size.")] = 20
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Number of untimed calls per size, made first.")] = 5

    def request(self, names: list[str]) -> CollectiveRequest:
        """Return the request for these collectives; raise UsageError for an unknown name or size."""
        return CollectiveRequest(
            collectives=parse_collectives(names),
            least=bytes_of(self.min_size),
            most=None if self.max_size is None else bytes_of(self.max_size),
            factor=self.factor,
            iterations=self.iterations,
            warm_ups=self.warmup,
        )


Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[COLLECTIVE]...", help="all_reduce, all_gather, reduce_scatter, alltoall or sendrecv. Default: all."
    ),
]
Pairwise = Annotated[
    bool, typer.Option("--pairwise", help="Find bad nodes: measure the nodes of a job alone and in pairs.")
]
Experts = Annotated[
    bool,
    typer.Option("--experts", help="Measure only the all-to-all of a recipe's experts (-w, -s), over its EP ranks."),
]


@takes(JOB, Sweep, Placed, value_options([replace(one, default=None) for one in OF_SHAPES]))
def collectives(
    values: dict[str, Any],
    sweep: Sweep,
    placed: Placed,
    shapes: dict[str, Any],
    ctx: typer.Context,
    names: Names = None,
    pairwise: Pairwise = False,
    experts: Experts = False,
) -> None:
    """Measure collectives between GPUs (NCCL) or processes (gloo), and print a table in the format of nccl-tests.

    The ranks are on this machine or, with --nodes or another scheduler option, in a job. Bandwidths and columns
    are those of nccl-tests, so 'llmb nccl' can read and compare the table. All results are checked: '#wrong' counts the
    elements with a wrong value, and any wrong element is an error.

    --pairwise finds bad nodes: a job measures every node alone, then in three or more rounds of disjoint pairs, and
    then the good nodes as a group, at fixed sizes. The expected time is printed first. A node that hangs delays only
    its partners. 'llmb submit --exclude unfit' skips the unfit nodes. In an allocation ('salloc', or a batch script)
    and without scheduler options, the nodes of the allocation are measured.

    --experts measures the all-to-all that dispatches the tokens of one micro-batch to the experts of a layer (and, in
    the same size, combines their outputs), in bf16 and over EP ranks. 'llmb predict --calibrate' then uses its time.

    Exit codes: 0 measured; 4 a result is wrong, memory ran out for a specified size, a rank failed, or a node is unfit.

    Examples:

    - `llmb bench collectives all_reduce --max-size 1GiB`

    - `llmb bench collectives --experts -w pretrain_mixtral -s 8x7b --scale 64 --ep 8`

    - `llmb bench collectives --device cpu --ranks 4 --max-size 1MiB > gloo.txt; llmb nccl gloo.txt`

    - `llmb bench collectives --nodes 2 --partition batch --wait`

    - `llmb bench collectives --pairwise --nodes 64 --wait`

    - `salloc --nodes 16 llmb bench collectives --pairwise`
    """
    given = flags_of(ctx, values)
    if pairwise:
        if own := ["COLLECTIVE" if name == "names" else f"--{name.replace('_', '-')}" for name in flags_of(ctx, SWEEP)]:
            raise UsageError(f"--pairwise cannot be combined with {', '.join(own)}", do="omit --pairwise or the others")
        here = None if placed.is_job(given) else job_here()
        if not given and here is None:
            do = "add --nodes, such as --nodes 8, or run the command in an allocation, such as one of 'salloc'"
            raise UsageError("--pairwise requires the nodes of a job", do=do)
        _pairwise(BenchJobRequest(values, placed, here), placed)
        return
    request = sweep.request(names or [])
    if experts:
        request = _of_experts(request, shapes, placed, flags_of(ctx, SWEEP))
        placed = placed if placed.ranks or placed.is_job(given) else replace(placed, ranks=request.ranks)
    elif of_recipe := [f"--{name.replace('_', '-')}" for name in flags_of(ctx, shapes)]:
        raise UsageError(f"{of_recipe[0]} is only for --experts", do=f"add --experts, or omit {of_recipe[0]}")
    if placed.is_job(given):
        _in_a_job(BenchJobRequest(values, placed), request, placed)
    else:
        _here(request, placed)


SWEEP = dict.fromkeys(("names", *Sweep.__dataclass_fields__, "experts", *NAMES))
"""Options that a pairwise measurement does not accept."""


def _of_experts(
    request: CollectiveRequest, shapes: dict[str, Any], placed: Placed, given: Mapping[str, Any]
) -> CollectiveRequest:
    if own := [name for name in ("names", "min_size", "max_size", "factor") if name in given]:
        what = "COLLECTIVE" if own[0] == "names" else f"--{own[0].replace('_', '-')}"
        raise UsageError(f"--experts measures a fixed all-to-all and does not accept {what}", do=f"omit {what}")
    if not shapes["workload"]:
        raise UsageError("--experts requires a recipe", do="add --workload, such as -w pretrain_mixtral -s 8x7b")
    catalogue, machine = Catalogue(), this_machine()
    workload, size = model_of(catalogue, shapes["workload"].lower(), shapes["size"] and shapes["size"].lower())
    device = device_here(placed.device, machine)
    named = build(Request, {**shapes, "workload": workload, "size": size})
    recipe = resolved_here(catalogue, named, (), device, machine)
    say(f"the exchange of {recipe_text(recipe)}")
    return expert_exchange(request, recipe)


def _check_ranks(sweep: CollectiveRequest, ranks: int) -> None:
    if ranks < LEAST_RANKS:
        raise UsageError(
            "collectives need at least two ranks", do="pass --nodes 2, or --ranks 2; on one GPU, also --device cpu"
        )
    if sweep.ranks not in (None, ranks):
        what = f"the recipe exchanges tokens over EP {sweep.ranks}, but the measurement has {ranks} ranks"
        raise UsageError(what, do=f"pass --ranks and --nodes for {sweep.ranks} ranks, or --ep {ranks} if valid")


def _here(sweep: CollectiveRequest, placed: Placed) -> None:
    device, ranks = placed.here(on_cpu=RANKS_ON_CPU)
    _check_ranks(sweep, ranks)
    job, measured_at, install = collective_job(sweep, device), now(), install_here()
    with CaseProgress() as progress:
        result = measure_here(job, ranks, progress.case)
    measured = measurement_file(job, result, command_line(), measured_at)
    table = "\n".join(collective_texts(job, result, llmb.__version__))
    kept = save_and_show(install, [measured], lambda: _show(measured, table, json=placed.json))
    _conclude(measured, kept)


def _in_a_job(request: BenchJobRequest, sweep: CollectiveRequest, placed: Placed) -> None:
    job = collective_job(sweep, request.device)
    processes = request.nodes.placement.processes
    _check_ranks(sweep, processes)
    program = BenchProgram("collectives", COLLECTIVES_PROGRAM, "torchrun", {COLLECTIVES_JOB: job.model_dump_json()})
    if done := queue(request.order(program, f"collectives over {processes} ranks, by llmb"), placed):
        end, folder = done
        _show(end.measured[0], (folder.path / TABLE).read_text(), json=placed.json)
        _conclude(end.measured[0], end.kept)


def _show(measured: MeasurementFile, table: str, *, json: bool) -> None:
    if json:
        print_output(measurement_document(measured))
    else:
        print_output(table)
        if measured.not_measured:
            print_output([not_measured_table(measured.not_measured)])


def _conclude(measured: MeasurementFile, kept: tuple[str, ...]) -> None:
    say(f"saved to {', '.join(kept)}")
    raise_if_wrong(measured)
    raise_if_incomplete(measured)


def _pairwise(request: BenchJobRequest, placed: Placed) -> None:
    placement = request.nodes.placement
    if placement.nodes < LEAST_NODES:
        what = f"--pairwise needs {LEAST_NODES} nodes: if two nodes differ, it is unclear which one is bad"
        raise UsageError(what, do=f"pass --nodes {LEAST_NODES} or more, which queues a job")
    nodes, per_node = placement.nodes, placement.processes_per_node
    usual, most = expected_s(nodes, per_node), limit_s(nodes, per_node)
    begin = "now" if request.here else "the start of the job"
    times = f"about {duration(usual)} from {begin}, at most {duration(most)} if nodes hang"
    say(f"{nodes} nodes: {times}")
    files = {**pair_files(request.device, nodes, per_node), SCHEDULE: schedule(nodes, per_node)}
    program = BenchProgram("pairwise", pair_rounds.__name__, "rounds", files, math.ceil(most / 60) + 1)
    order = request.order(program, f"pairs of {nodes} nodes, by llmb")
    if request.here:
        say("running on the nodes of this job; to queue another job, add a scheduler option such as --nodes")
        end = run_here(order, os.environ)
    elif done := queue(order, placed):
        end, _ = done
    else:
        return
    if end.pairwise:
        result = end.pairwise
        host_list = order.scheduler.host_list
        print_output(pairs_document(result, host_list) if placed.json else pairs_tables(result, host_list))
        unfit = host_list(result.names(fit=False))
        count, total = len(result.names(fit=False)), len(result.nodes)
        if count:
            do = f"run 'llmb doctor --nodes {unfit}' to find the cause; 'llmb submit --exclude unfit' avoids them"
            raise RunFailed(f"unfit nodes ({count} of {total}): {unfit}", do=do)
        if not result.names(fit=True):
            raise RunFailed(f"none of {total} nodes could be judged", do="see the reason for each node in the result")

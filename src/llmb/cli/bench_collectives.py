# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives``, on this machine, in a job, or between pairs of nodes."""

import math
import os
from typing import Annotated, Any

import typer

import llmb
from llmb.bench import pair_rounds
from llmb.bench.bench_job import BenchProgram, run_here
from llmb.bench.collectives import (
    LEAST_BYTES,
    TABLE,
    CollectiveRequest,
    collective_job,
    collective_texts,
    measure_here,
    measurement_file,
    named_collectives,
    raise_if_wrong,
)
from llmb.bench.device_bench import DeviceChoice, bytes_of, raise_if_missing
from llmb.bench.measurements import MeasurementFile
from llmb.bench.pair_rounds import SCHEDULE, expected_s, limit_s, schedule
from llmb.bench.pairs import LEAST_NODES, PairwiseResult, pair_files
from llmb.bench.protocol import COLLECTIVES_JOB, COLLECTIVES_PROGRAM
from llmb.cli.bench_jobs import (
    JOB,
    BenchJobRequest,
    DryRun,
    Ranks,
    Wait,
    check_is_job,
    command_line,
    job_here,
    queue,
    ranks_here,
    save_and_show,
)
from llmb.cli.common import Json
from llmb.cli.options import given_of, takes
from llmb.cli.progress import CaseProgress
from llmb.cli.root import install_here, say
from llmb.errors import RunFailed, UsageError
from llmb.jobs.task import TaskOrder
from llmb.report.bench_report import measurement_document, not_measured_table, pairs_document, pairs_tables
from llmb.report.output import print_output
from llmb.report.table import duration
from llmb.runs.record import now
from llmb.schedulers.port import Scheduler

RANKS_ON_CPU = 4
LEAST_RANKS = 2


@takes(JOB)
def collectives(
    values: dict[str, Any],
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...",
            help="all_reduce, all_gather, reduce_scatter, alltoall, sendrecv. Default: all of them.",
        ),
    ] = None,
    min_size: Annotated[str, typer.Option("--min-size", help="Smallest size, with a unit.")] = f"{LEAST_BYTES}B",
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", help="Largest size. Default: 16GiB on GPUs, 16MiB on CPUs, or what memory allows."),
    ] = None,
    factor: Annotated[int, typer.Option("--factor", min=2, help="Factor between one size and the next.")] = 2,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Timed calls of each size.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Untimed calls before the timed ones.")] = 5,
    ranks: Ranks = None,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="'cuda' is NCCL, 'cpu' is gloo; 'auto': GPUs if there are any.")
    ] = "auto",
    pairwise: Annotated[
        bool,
        typer.Option("--pairwise", help="In a job: find the bad nodes, by measuring each alone and in pairs."),
    ] = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Collectives between GPUs (NCCL) or processes (gloo), with the table of nccl-tests.

    On the ranks of this machine, or in a job: --nodes, or any other option of the scheduler. Bandwidths and columns are
    those of nccl-tests, so 'llmb nccl' reads the table and compares it with others. Every result is checked against the
    expected values; '#wrong' counts the elements that differ, and any is an error.

    --pairwise names bad nodes: a job measures every node alone, then in rounds of disjoint pairs, three or more for
    each node, and then the good ones as a group, at sizes of its own. The time is printed before. A node that hangs
    costs only its partners' time. 'llmb submit --exclude unfit' leaves the unfit ones out. Called in an allocation
    ('salloc', or a batch script) without options of the scheduler, it measures the nodes of this.

    Exit codes: 0 measured, 4 a result is wrong, memory ran out for a size that was specified, a rank failed, or a node
    is unfit.

    Examples:

    - `llmb bench collectives all_reduce --max-size 1GiB`

    - `llmb bench collectives --device cpu --ranks 4 --max-size 1MiB > gloo.txt; llmb nccl gloo.txt`

    - `llmb bench collectives --nodes 2 --partition batch --wait`

    - `llmb bench collectives --pairwise --nodes 64 --wait`

    - `salloc --nodes 16 llmb bench collectives --pairwise`
    """
    given = given_of(ctx, values)
    if pairwise:
        _check_own_sweep(ctx)
        here = None if check_is_job(given, wait=wait, dry_run=dry_run) else job_here()
        if not given and here is None:
            do = "add --nodes, such as --nodes 8, or call it in an allocation, as of 'salloc'"
            raise UsageError("--pairwise compares the nodes of a job", do=do)
        _pairwise(BenchJobRequest(values, device, ranks, here), wait=wait, dry_run=dry_run, json=json)
        return
    sweep = CollectiveRequest(
        collectives=named_collectives(names or []),
        least=bytes_of(min_size),
        most=None if max_size is None else bytes_of(max_size),
        factor=factor,
        iterations=iterations,
        warm_ups=warmup,
    )
    if check_is_job(given, wait=wait, dry_run=dry_run):
        _in_a_job(BenchJobRequest(values, device, ranks), sweep, wait=wait, dry_run=dry_run, json=json)
    else:
        _here(sweep, device, ranks, json=json)


def _here(sweep: CollectiveRequest, choice: DeviceChoice, ranks: int | None, *, json: bool) -> None:
    device, ranks = ranks_here(choice, ranks, on_cpu=RANKS_ON_CPU)
    if ranks < LEAST_RANKS:
        raise UsageError("collectives need two ranks", do="choose --device cpu, or measure between nodes: --nodes 2")
    job, measured_at = collective_job(sweep, device), now()
    install = install_here()
    with CaseProgress() as progress:
        result = measure_here(job, ranks, progress.case)
    measured = measurement_file(job, result, command_line(), measured_at)
    table = "\n".join(collective_texts(job, result, llmb.__version__))
    kept = save_and_show(install, [measured], lambda: _show(measured, table, json=json))
    _conclude(measured, kept)


def _in_a_job(request: BenchJobRequest, sweep: CollectiveRequest, *, wait: bool, dry_run: bool, json: bool) -> None:
    job = collective_job(sweep, request.device)
    placement = request.nodes.placement
    if placement.processes < LEAST_RANKS:
        raise UsageError("collectives need two ranks", do="add --nodes 2, or --ranks")
    program = BenchProgram("collectives", COLLECTIVES_PROGRAM, "torchrun", {COLLECTIVES_JOB: job.model_dump_json()})
    order = request.order(program, f"collectives over {placement.processes} ranks, by llmb")
    done = queue(order, dry_run=dry_run, wait=wait, json=json)
    if done:
        end, folder = done
        _show(end.measured[0], (folder.path / TABLE).read_text(), json=json)
        _conclude(end.measured[0], end.kept)


def _show(measured: MeasurementFile, table: str, *, json: bool) -> None:
    if json:
        print_output(measurement_document(measured))
    else:
        print_output(table)
        if measured.not_measured:
            print_output([not_measured_table(measured.not_measured)])


def _conclude(measured: MeasurementFile, kept: tuple[str, ...]) -> None:
    """Raises RunFailed for a result that is wrong, or that memory ran out for."""
    say(f"saved to {', '.join(kept)}")
    raise_if_wrong(measured)
    raise_if_missing(measured)


SWEEP = {"names": "COLLECTIVE", "min_size": "--min-size", "max_size": "--max-size", "factor": "--factor"}
SWEEP |= {"iterations": "--iterations", "warmup": "--warmup"}


def _check_own_sweep(ctx: typer.Context) -> None:
    """Raises UsageError for options that a pairwise measurement does not take."""
    given = [SWEEP[name] for name in given_of(ctx, SWEEP)]
    if given:
        raise UsageError(f"--pairwise has sizes of its own, and does not take {', '.join(given)}", do="omit them")


def _pairwise(request: BenchJobRequest, *, wait: bool, dry_run: bool, json: bool) -> None:
    order = _pair_order(request)
    if request.here:
        say("on the nodes of this job; with an option of the scheduler, such as --nodes, it queues another one")
        end = run_here(order, os.environ)
    elif done := queue(order, dry_run=dry_run, wait=wait, json=json):
        end, _ = done
    else:
        return
    if end.pairwise:
        _conclude_pairs(end.pairwise, order.scheduler, json=json)


def _pair_order(request: BenchJobRequest) -> TaskOrder:
    placement = request.nodes.placement
    if placement.nodes < LEAST_NODES:
        what = f"--pairwise needs {LEAST_NODES} nodes: of two that differ, nothing tells which one is bad"
        raise UsageError(what, do=f"add --nodes {LEAST_NODES} or more, which queues a job")
    nodes, per_node = placement.nodes, placement.processes_per_node
    usual, most = expected_s(nodes, per_node), limit_s(nodes, per_node)
    begin = "now" if request.here else "the start of the job"
    times = f"about {duration(usual)} from {begin}, at most {duration(most)} if nodes hang"
    say(f"{nodes} nodes: {times}")
    files = {**pair_files(request.device, nodes, per_node), SCHEDULE: schedule(nodes, per_node)}
    program = BenchProgram("pairwise", pair_rounds.__name__, "rounds", files, math.ceil(most / 60) + 1)
    return request.order(program, f"pairs of {nodes} nodes, by llmb")


def _conclude_pairs(result: PairwiseResult, scheduler: Scheduler, *, json: bool) -> None:
    """Raises RunFailed if a node is unfit, also where none is known to be fit."""
    host_list = scheduler.host_list
    print_output(pairs_document(result, host_list) if json else pairs_tables(result, host_list))
    unfit = host_list(result.named(fit=False))
    count, total = len(result.named(fit=False)), len(result.nodes)
    if count:
        do = "'llmb submit --exclude unfit' leaves them out, 'llmb doctor' on them looks for the cause"
        raise RunFailed(f"{count} of {total} nodes are not fit: {unfit}", do=do)
    if not result.named(fit=True):
        raise RunFailed(f"none of {total} nodes could be judged", do="see the reasons above, and the log of the job")

# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives``."""

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

import llmb
from llmb.bench.bench_job import BenchProgram
from llmb.bench.cases import bytes_of
from llmb.bench.collective_bench import (
    LEAST_BYTES,
    TABLE,
    CollectiveRequest,
    collective_job,
    measure_here,
    measurement_file,
    named_collectives,
    raise_if_wrong,
)
from llmb.bench.collectives import JOB as FILE
from llmb.bench.collectives import PROGRAM
from llmb.bench.device_bench import DeviceChoice, device_here, raise_if_missing
from llmb.bench.nccl_table import collective_texts
from llmb.bench.records import MeasurementFile
from llmb.cli.bench_jobs import JOB, BenchJobRequest, DryRun, Ranks, Wait, check_is_job, queue, save_and_show
from llmb.cli.common import Json
from llmb.cli.options import given_of, takes
from llmb.cli.progress import CaseProgress
from llmb.cli.root import install_here, say
from llmb.errors import EnvironmentProblem, UsageError
from llmb.report.bench_report import measurement_document, not_measured_table
from llmb.report.output import print_json, print_tables, print_text
from llmb.site.machine import this_machine

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
    wait: Wait = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Collectives between GPUs (NCCL) or processes (gloo), with the table of nccl-tests.

    On the ranks of this machine, or in a job: --nodes, or any other option of the scheduler. Bandwidths and columns are
    those of nccl-tests, so 'llmb nccl' reads the table and compares it with others. Every result is checked against the
    expected values; '#wrong' counts the elements that differ, and any is an error.

    Exit codes: 0 measured, 4 a result is wrong, memory ran out for a size that was specified, or a rank failed.

    Examples:

    - `llmb bench collectives all_reduce --max-size 1GiB`

    - `llmb bench collectives --device cpu --ranks 4 --max-size 1MiB > gloo.txt; llmb nccl gloo.txt`

    - `llmb bench collectives --nodes 2 --partition batch --wait`
    """
    sweep = CollectiveRequest(
        collectives=named_collectives(names or []),
        least=bytes_of(min_size),
        most=None if max_size is None else bytes_of(max_size),
        factor=factor,
        iterations=iterations,
        warm_ups=warmup,
    )
    if check_is_job(given_of(ctx, values), wait=wait, dry_run=dry_run):
        _in_a_job(BenchJobRequest(values, device, ranks), sweep, wait=wait, dry_run=dry_run, json=json)
    else:
        _here(sweep, device, ranks, json=json)


def _here(sweep: CollectiveRequest, choice: DeviceChoice, ranks: int | None, *, json: bool) -> None:
    machine = this_machine()
    device = device_here(choice, machine)
    here = len(machine.gpu_names) if device == "cuda" else RANKS_ON_CPU
    ranks = here if ranks is None else ranks
    if device == "cuda" and ranks > here:
        raise EnvironmentProblem(f"{ranks} ranks need as many GPUs, and this machine has {here}", do="lower --ranks")
    if ranks < LEAST_RANKS:
        raise UsageError("collectives need two ranks", do="choose --device cpu, or measure between nodes: --nodes 2")
    job, measured_at = collective_job(sweep, device), datetime.now(UTC).isoformat(timespec="seconds")
    install = install_here()
    with CaseProgress() as progress:
        result = measure_here(job, ranks, progress.case)
    measured = measurement_file(job, result, ("llmb", *sys.argv[1:]), measured_at)
    table = "\n".join(collective_texts(job, result, llmb.__version__))
    kept = save_and_show(install, [measured], lambda: _show(measured, table, json=json))
    _conclude(measured, kept)


def _in_a_job(request: BenchJobRequest, sweep: CollectiveRequest, *, wait: bool, dry_run: bool, json: bool) -> None:
    job = collective_job(sweep, request.device)
    placement = request.nodes.placement
    if placement.processes < LEAST_RANKS:
        raise UsageError("collectives need two ranks", do="add --nodes 2, or --ranks")
    program = BenchProgram("collectives", PROGRAM, "torchrun", FILE)
    order = request.order(program, f"collectives over {placement.processes} ranks, by llmb", job.model_dump_json())
    done = queue(order, dry_run=dry_run, wait=wait, json=json)
    if done:
        end, folder = done
        _show(end.measured[0], (folder.path / TABLE).read_text(), json=json)
        _conclude(end.measured[0], end.kept)


def _show(measured: MeasurementFile, table: str, *, json: bool) -> None:
    if json:
        print_json(measurement_document(measured))
    else:
        print_text(table)
        if measured.not_measured:
            print_tables([not_measured_table(measured.not_measured)])


def _conclude(measured: MeasurementFile, kept: tuple[str, ...]) -> None:
    """Raises RunFailed for a result that is wrong, or that memory ran out for."""
    say(f"saved to {', '.join(kept)}")
    raise_if_wrong(measured)
    raise_if_missing(measured)

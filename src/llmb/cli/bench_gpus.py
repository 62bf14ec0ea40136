# SPDX-License-Identifier: Apache-2.0
"""``llmb bench gpus``."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from llmb.bench.bench_job import BenchProgram
from llmb.bench.device_bench import DeviceChoice, device_here
from llmb.bench.gpus import Parts, compare_parts, gpu_files, gpus_job, measure_parts
from llmb.bench.outliers import outlier_rule
from llmb.bench.records import JOB as FILE
from llmb.bench.records import PROGRAM, MeasurementFile
from llmb.cli.bench_jobs import JOB, BenchJobRequest, DryRun, Ranks, Wait, check_is_job, queue, save_and_show
from llmb.cli.options import Json, given_of, takes
from llmb.cli.progress import CaseProgress
from llmb.cli.root import install_here, say
from llmb.errors import EnvironmentProblem, RunFailed
from llmb.report.bench_report import advice, gpus_document, gpus_tables
from llmb.report.output import print_output
from llmb.site.machine import this_machine

SECONDS = 5.0


@takes(JOB)
def gpus(
    values: dict[str, Any],
    ctx: typer.Context,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="How long the product is repeated; the last third counts.")
    ] = SECONDS,
    ranks: Ranks = None,
    device: Annotated[
        DeviceChoice, typer.Option("--device", help="'auto': GPUs if there are any, else CPUs.")
    ] = "auto",
    wait: Wait = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Find slow GPUs: the same matrix product on every GPU at once.

    On the GPUs of this machine, or in a job: --nodes, or any other option of Slurm. Nodes do not talk to each other,
    so one that is broken keeps no other from its result. A GPU is slow if it is more than 5 % and more than 4 robust
    standard deviations below the median; it is named by node, local rank and UUID, with the list of nodes for
    'llmb submit --exclude'.

    Exit codes: 0 no GPU is slow, 4 one is slow, failed, or did not report.

    Examples:

    - `llmb bench gpus`

    - `llmb bench gpus --nodes 16 --partition batch --wait`
    """
    if check_is_job(given_of(ctx, values), wait=wait, dry_run=dry_run):
        request = BenchJobRequest(values, device, ranks)
        program = BenchProgram("gpus", PROGRAM, "task-per-gpu", FILE)
        title = f"a product on {request.nodes.placement.processes} devices, by llmb"
        document = gpus_job(request.device, seconds).model_dump_json()
        done = queue(request.order(program, title, document), dry_run=dry_run, wait=wait, json=json)
        if done:
            parts = compare_parts(done[0].measured, done[0].missing_nodes, outlier_rule())
            _show(parts, json=json)
            _conclude(parts, done[0].kept)
    else:
        install = install_here()
        files = _measured_here(device, ranks, seconds)
        parts = compare_parts(files, (), outlier_rule())
        _conclude(parts, save_and_show(install, files, lambda: _show(parts, json=json)))


def _measured_here(choice: DeviceChoice, ranks: int | None, seconds: float) -> list[MeasurementFile]:
    machine = this_machine()
    device = device_here(choice, machine)
    here = len(machine.gpu_names) if device == "cuda" else machine.cores
    if device == "cuda" and ranks and ranks > here:
        raise EnvironmentProblem(f"{ranks} ranks need as many GPUs, and this machine has {here}", do="lower --ranks")
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    with CaseProgress() as progress:
        reports = measure_parts(gpus_job(device, seconds), ranks or here, progress.case)
    return list(gpu_files(reports, ("llmb", *sys.argv[1:]), measured_at))


def _show(parts: Parts, *, json: bool) -> None:
    print_output(gpus_document(parts, outlier_rule()) if json else gpus_tables(parts, outlier_rule()))


def _conclude(parts: Parts, kept: Sequence[str]) -> None:
    """Raises RunFailed if a node is unfit."""
    if kept:
        say(f"saved to {kept[0]}{f' and {len(kept) - 1} more' if kept[1:] else ''}")
    slow = [f"{part.row.node} rank {part.row.rank}" for part in parts.slow]
    other = [*(f"{node} {row.case}" for node, row in parts.failed), *parts.missing_nodes]
    if slow or other:
        named = [f"slow: {', '.join(slow)}"] if slow else []
        raise RunFailed(
            "; ".join([*named, *([f"not measured: {', '.join(other)}"] if other else [])]), do=advice(parts)
        )

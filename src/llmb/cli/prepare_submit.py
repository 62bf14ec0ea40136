# SPDX-License-Identifier: Apache-2.0
"""``llmb prepare submit``."""

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import model_of, split_model
from llmb.catalogue.resolve import find_workload
from llmb.cli.campaign_options import DryRun, Yes, with_excluded
from llmb.cli.common import Json
from llmb.cli.options import given_of, given_once, takes, value_options
from llmb.cli.root import agree, install_here, say
from llmb.errors import UsageError
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.submit import submit_task, unanswered_is_explained
from llmb.jobs.task import TaskOrder
from llmb.options.option import build, options_of
from llmb.prepare.jobs import (
    TOKENS,
    PrepareChoices,
    preparation_orders,
    same_jobs,
)
from llmb.reference_suite.variables import documented_variables, near_misses, read_preparation_variables
from llmb.report.campaign_report import flags_text, queued_document, submit_text
from llmb.report.output import print_output
from llmb.schedulers.lookup import read_cluster_site, read_job_options, scheduler_options

OF_RUNS = frozenset(("nodes", "array", "retries", "start", "segment", "signal_before"))
"""Options of the scheduler that a preparation has no use for."""
CHOICES = options_of(PrepareChoices)
OF_JOBS = {name: item for name, item in scheduler_options().items() if name not in OF_RUNS}
OPTIONS = value_options({**CHOICES, **OF_JOBS}.values(), envvar=False)


@takes(OPTIONS)
def submit(
    values: dict[str, Any],
    ctx: typer.Context,
    workload_argument: Annotated[str | None, typer.Argument(metavar="WORKLOAD", help="The same as --workload.")] = None,
    workload: Annotated[str | None, typer.Option("-w", "--workload", help="Workload; see 'llmb list'.")] = None,
    size: Annotated[
        str | None, typer.Option("-s", "--size", help="Model size. Default: MODEL_SIZE, or the documents' only one.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Prepare in jobs of one node: one for the dataset, one for the checkpoint.

    It reads the variables of the reference documents' download script: HF_TOKEN, GPU_TYPE, SBATCH_ACCOUNT,
    SBATCH_PARTITION, SBATCH_GPUS_PER_NODE, TIME_LIMIT, SKIP_DATASET_DOWNLOAD and SKIP_IMPORT_CHECKPOINT. A job asks for
    a GPU only if SBATCH_GPUS_PER_NODE or --gpus-per-node does. The time limit is 55 minutes by default; a job that ran
    out of time is resumed by submitting it again.

    A token reaches the job in its environment, and is in no file, script or command line.

    Examples:

    - `HF_TOKEN=... llmb prepare submit -w finetune_llama3 -s 70b`

    - `SKIP_IMPORT_CHECKPOINT=true TIME_LIMIT=01:30:00 llmb prepare submit finetune_llama4-maverick --dry-run`
    """
    catalogue, environ = Catalogue(), os.environ
    for warning in near_misses(documented_variables(), environ):
        say(f"warning: {warning}")
    name = given_once("workload", workload_argument, workload)
    if name is None:
        raise UsageError("the workload is not specified", do="give it with --workload; see 'llmb list'")
    given = with_excluded(given_of(ctx, values))
    given |= {"size": size} if size else {}
    orders = _orders(catalogue, name.lower(), values, given, environ)
    scripts = [order.script() for order in orders]
    if dry_run:
        jobs = [{**_identity(order), "script": text} for order, text in zip(orders, scripts, strict=True)]
        print_output({"jobs": jobs} if json else "\n".join(scripts))
        return
    _confirm(orders, yes=yes)
    queued = _queued(orders, environ)
    print_output(queued_document(queued) if json else submit_text(queued))


def _orders(
    catalogue: Catalogue,
    name: str,
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
) -> list[TaskOrder]:
    """The jobs that options and variables ask for. Raises UsageError."""
    workload, own_size = split_model(catalogue, name)
    known = {**CHOICES, **scheduler_options()}
    reading = read_preparation_variables(documented_variables(), environ, workload, known, given)
    for note in reading.notes:
        say(f"note: {note}")
    found = {**values, **reading.options, **given}
    only = [size for size in find_workload(catalogue, workload).sources if size != "tiny"]
    size = found.get("size") or own_size or (only[0] if len(only) == 1 else None)
    workload, size = model_of(catalogue, workload, size)
    site = read_cluster_site(catalogue, install_here(), environ)
    for note in site.notes:
        say(note)
    # Variables that apply to runs alone, such as GPUS_PER_NODE, are not read by the scheduler's options either.
    runs = {item.name for item in documented_variables() if not item.prepares}
    shell = {name: value for name, value in environ.items() if name not in runs}
    options = read_job_options(site, {name: found.get(name) for name in OF_JOBS}, shell, sys.executable)
    return preparation_orders(catalogue, workload, size, build(PrepareChoices, found), options, site)


def _identity(order: TaskOrder) -> dict[str, Any]:
    task = order.task
    return {
        "workload": task.workload,
        "size": task.size,
        "prepares": task.subject,
        "gpus": task.scale if task.gpus else 0,
    }


def _confirm(orders: list[TaskOrder], *, yes: bool) -> None:
    for order in orders:
        say(f"the job for the {order.task.subject} requests {flags_text(order.sample().flags)}")
    if not all(order.sources for order in orders) and not any(os.environ.get(name) for name in TOKENS):
        say("note: HF_TOKEN is not set: for a gated model, set it, or log in with 'hf auth login' before")
    if yes or not sys.stdin.isatty():
        return
    agree("Queue them?" if len(orders) > 1 else "Queue it?", default=True)


def _queued(orders: list[TaskOrder], environ: Mapping[str, str]) -> list[Job]:
    """Queues what no job prepares already."""
    install = orders[0].site.install
    with open_history(install, say) as store:
        same = same_jobs(store, install, orders)
        for part, job in same.items():
            say(f"the {part} is being prepared already, by job {job.job_id}: {job.run_dir}")
        new = [order for order in orders if order.task.subject not in same]
        with unanswered_is_explained():
            return [submit_task(store, order, environ) for order in new]

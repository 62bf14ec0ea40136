# SPDX-License-Identifier: Apache-2.0
"""``llmb submit``."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request
from llmb.cli.options import Json, recipe_options, takes
from llmb.cli.progress import JobProgress
from llmb.cli.result import print_result
from llmb.cli.slurm_options import slurm_options
from llmb.cli.training_options import training_options
from llmb.errors import UsageError, UserInterrupt
from llmb.launch.site import read_site
from llmb.launch.slurm.follow import follow_job
from llmb.launch.slurm.options import SlurmOptions
from llmb.launch.slurm.script import batch_script
from llmb.launch.slurm.submission import Order, Queued, make_order, queue
from llmb.report.output import print_json, print_text
from llmb.report.run_report import plan_title
from llmb.report.submit_report import flags_text, submit_document, submit_text
from llmb.runs.choices import Choices
from llmb.runs.folder import install_root
from llmb.runs.result import Result

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(recipe_options, training_options, slurm_options)
def submit(
    request: Request,
    choices: Choices,
    options: SlurmOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, queue nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end and print the result.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before queueing.")] = False,
    json: Json = False,
) -> None:
    """Queue a run on a Slurm cluster, with the same options as `llmb run`.

    The plan is checked here and now. The run folder is made at once: it holds the batch script and, later, the results.
    Options come before variables of the shell (SBATCH_ACCOUNT, SBATCH_PARTITION, TIME_LIMIT, GPUS_PER_NODE,
    ADDITIONAL_SLURM_PARAMS), those before cluster_config.yaml in $LLMB_INSTALL, and that before the recipe's defaults.

    Examples:

    - `llmb submit -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11 --dry-run`

    - `llmb submit -w pretrain_nemotron4 -s 340b --scale 2048 --account research --partition batch`

    - `llmb submit -w pretrain_llama3.1 -s 8b --scale 16 --wait --slurm-arg comment=weekly --env NCCL_DEBUG=INFO`
    """
    catalogue, install = Catalogue(), install_root(os.environ, Path.cwd())
    order = make_order(catalogue, request, choices, options, read_site(catalogue, install, os.environ))
    if dry_run:
        print_text(batch_script(order.sample()))
        return
    if wait and order.indices():
        raise UsageError("--wait follows one job, and --array makes several", do="leave one of them out")
    _confirm(order, yes=yes)
    queued = queue(order, os.environ)
    if wait:
        (run,) = queued
        sys.stderr.write(submit_text({run.folder: run.job}))
        print_result(run.folder, order.plan, _follow(order, run), json=json)
    elif json:
        print_json(submit_document({run.folder: run.job for run in queued}))
    else:
        print_text(submit_text({run.folder: run.job for run in queued}))


def _confirm(order: Order, *, yes: bool) -> None:
    sys.stderr.write(f"{plan_title(order.plan)}: {flags_text(order.sample().flags)}\n")
    if not yes and sys.stdin.isatty() and not typer.confirm("Queue it?", default=True, err=True):
        raise UserInterrupt("nothing was queued")


def _follow(order: Order, run: Queued) -> Result:
    with JobProgress(run.job.job_id, order.plan.steps, order.plan.first_step) as progress:
        try:
            return follow_job(run.folder, run.job, progress.state, progress.step)
        except KeyboardInterrupt as error:
            do = f"'scancel {run.job.job_id}' ends the job"
            raise UserInterrupt("not waiting any more; the job goes on", where=str(run.folder.path), do=do) from error

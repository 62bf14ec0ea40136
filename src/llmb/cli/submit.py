# SPDX-License-Identifier: Apache-2.0
"""``llmb submit``."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.entry import Entry
from llmb.campaigns.job_request import job_request
from llmb.campaigns.queueing import CampaignContext, WantedJobs, plan_one, queue_one
from llmb.campaigns.selection import selection_of, single_model
from llmb.catalogue.load import Catalogue
from llmb.cli.campaign_options import JOB, NAMED_SELECTION, DryRun, Resume, StartNew, Yes, run_campaign
from llmb.cli.excluded import with_excluded
from llmb.cli.json_option import Json
from llmb.cli.messages import can_ask, say
from llmb.cli.options import given_of, takes
from llmb.cli.progress import JobProgress
from llmb.cli.result import print_run
from llmb.cli.root import context_here
from llmb.errors import UsageError, UserInterrupt
from llmb.jobs.job import Job
from llmb.jobs.order import Order
from llmb.jobs.wait import Watch, wait_for_one
from llmb.report.output import print_json, print_text
from llmb.report.plan_report import flags_text, script_document, start_lines, submit_document, submit_text
from llmb.runs.folder import RunFolder
from llmb.runs.plan import scale_warnings

COMMAND_LINE = "the command line"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(NAMED_SELECTION, JOB)
def submit(
    selecting: dict[str, Any],
    values: dict[str, Any],
    ctx: typer.Context,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end and print the result.")] = False,
    yes: Yes = False,
    resume: Resume = False,
    start_new: StartNew = False,
    json: Json = False,
) -> None:
    """Queue runs on a Slurm cluster, with the same options as `llmb run`.

    One recipe is one job; `--dry-run` prints its batch script. Lists with commas, limits of the scale and repeats make
    a campaign: all combinations, the largest first. Workloads, sizes, dtypes and scales that are not specified default
    to all that the cluster's GPU type has. A campaign is shown and confirmed. A client that is killed loses nothing:
    the same command resumes, and no job is queued twice. With `--profile` a campaign has one additional, profiled run
    of each recipe.

    Every plan is checked before submission. The run folder is created immediately: it contains the batch script and,
    later, the results. Options override the shell's variables (SBATCH_ACCOUNT, SBATCH_PARTITION, TIME_LIMIT,
    GPUS_PER_NODE, ADDITIONAL_SLURM_PARAMS), variables override cluster_config.yaml in $LLMB_INSTALL, and that file
    overrides the recipe's defaults.

    Examples:

    - `llmb submit -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11 --dry-run`

    - `llmb submit -w pretrain_nemotron4 -s 340b --scale 2048 --account research --partition batch`

    - `llmb submit -w pretrain_llama3.1 -s 8b --scale 16 --wait --slurm-arg comment=weekly --env NCCL_DEBUG=INFO`

    - `llmb submit -w pretrain_llama3.1 -s 405b --scale 576 --exclude unfit`

    - `llmb submit -w pretrain_llama3.1,pretrain_nemotron4 --dtype bf16,fp8 --max-scale 512 --repeats 3`
    """
    selection = selection_of(selecting)
    given = given_of(ctx, values)
    values = with_excluded(values)
    repeats = 1 if selecting["repeats"] is None else selecting["repeats"]
    model = single_model(Catalogue(), selection, repeats)
    if model:
        own = {"dtype": next(iter(selection.dtypes), None), "scale": next(iter(selection.scales), None)}
        chosen = {"gpu_type": selection.gpu_type, "release": selection.release}
        wanted = job_request({**values, "workload": model[0], "size": model[1], **own, **chosen}, os.environ)
        submit_one(wanted, dry_run=dry_run, wait=wait, yes=yes, json=json)
        return
    if wait:
        raise UsageError("--wait follows one job, and this is a campaign", do="omit it, or name one recipe")
    profile = bool(values.get("profile"))
    entry = Entry(where=COMMAND_LINE, selection=selection, repeats=repeats, add_profile=profile)
    campaign = WantedJobs(
        source=COMMAND_LINE,
        entries=[entry],
        values={**values, "profile": False},
        given={name: values[name] for name in given if name != "profile"},
    )
    context = context_here(dry_run=dry_run)
    run_campaign(context, campaign, dry_run=dry_run, yes=yes, json=json, resume=resume, start_new=start_new)


def submit_one(wanted: JobRequest, *, dry_run: bool, wait: bool, yes: bool, json: bool) -> None:
    """Shows one job, asks for confirmation, and queues it; with ``wait`` prints its result."""
    context = context_here(dry_run=dry_run)
    order = plan_one(context, wanted, wait=wait and not dry_run)
    for line in start_lines(order.plan):
        say(line)
    for warning in scale_warnings(order.plan, loads=wanted.choices.load_checkpoint is not None):
        say(f"warning: {warning}")
    if order.missing:
        say(f"warning: {order.missing.warning}")
    if dry_run:
        script = order.script()
        if json:
            print_json(script_document(order, script))
        else:
            print_text(script)
        return
    _confirm(order, yes=yes)
    queued = queue_one(context, order, say)
    if wait:
        sys.stderr.write(submit_text(queued))
        _wait(context, order, queued[0], json=json)
    elif json:
        print_json(submit_document(order.plan.origin, queued))
    else:
        print_text(submit_text(queued))


def _confirm(order: Order, *, yes: bool) -> None:
    say(f"the job asks for {flags_text(order.sample().flags)}")
    if yes or not sys.stdin.isatty():
        return
    if not can_ask():
        raise UsageError("there is no terminal to ask on, so queueing cannot be confirmed", do="add --yes")
    if not typer.confirm("Queue it?", default=True, err=True):
        raise UserInterrupt("nothing was queued")


def _wait(context: CampaignContext, order: Order, job: Job, *, json: bool) -> None:
    """Follows the run to its end, including retries, and prints its result."""
    with JobProgress(order.plan.steps, order.plan.first_step) as progress:
        ended = wait_for_one(context.install, job, context.environ, say, Watch(progress.job, progress.step))
    print_run(RunFolder(Path(ended.run_dir)), json=json)
